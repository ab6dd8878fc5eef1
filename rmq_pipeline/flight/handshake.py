"""How the table door sees the header ``authorization``, and sells tokens to Flight clients."""

from typing import Any, Final

from pyarrow import flight
from typing_extensions import override

from rmq_pipeline.access import Access
from rmq_pipeline.errors import UnauthorizedError

_HEADER: Final = "authorization"


class Handshake(flight.ServerAuthHandler):
    """Lets every call through: the door itself asks who makes it, and answers refusals."""

    @override
    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        """Nothing: the header says it."""

    @override
    def is_valid(self, token: bytes) -> bytes:
        return b""


class Headers(flight.ServerMiddlewareFactory):
    """Keeps the header of each call for ``authorization_of``."""

    NAME: Final = "authorization"

    def __init__(self, access: Access) -> None:
        super().__init__()
        self._access = access

    @override
    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str]]) -> "Shown | None":
        if not self._access.enabled:
            return None
        shown = headers.get(_HEADER) or [""]
        if info.method != flight.FlightMethod.HANDSHAKE:
            return Shown(shown[0])
        try:
            principal = self._access.sign_in(shown[0])
        except UnauthorizedError as error:
            raise flight.FlightUnauthenticatedError(str(error)) from error
        token = "" if principal is None else self._access.token(principal)
        return Shown(shown[0], answer={_HEADER: f"Bearer {token}"})


class Shown(flight.ServerMiddleware):
    """What one call has shown, and what the answer to a handshake gives."""

    def __init__(self, authorization: str, *, answer: dict[str, str] | None = None) -> None:
        super().__init__()
        self.authorization = authorization
        self._answer = answer or {}

    @override
    def sending_headers(self) -> dict[str, str]:
        return self._answer


def authorization_of(context: flight.ServerCallContext) -> str | None:
    """The header of a call; None: it had none."""
    shown = context.get_middleware(Headers.NAME)
    return (shown.authorization or None) if isinstance(shown, Shown) else None
