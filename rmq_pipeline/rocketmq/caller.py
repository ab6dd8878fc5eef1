"""Who calls: what the metadata of a call say, read once."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from rmq_pipeline.access.user import Principal
from rmq_pipeline.errors import ClientIdRequiredError
from rmq_pipeline.topic import DLQ_PREFIX, RETRY_PREFIX


@dataclass(frozen=True, slots=True)
class Caller:
    """One call's caller."""

    #: The client's identity, which it keeps as long as it runs.
    client_id: str
    #: As the header has it; Node says HTTP, and its real language in its settings.
    language: str
    #: Of resources that name none.
    namespace: str
    #: None: anybody, while there is no access control.
    user: Principal | None
    #: The call itself.
    call: Any

    @property
    def peer(self) -> str:
        """Its address, without the port."""
        kind, _, rest = unquote(self.call.peer()).partition(":")
        return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else rest

    def remaining_ms(self) -> int | None:
        """How long the client still waits for the answer; None: for ever."""
        remaining = self.call.time_remaining()
        return None if remaining is None else int(remaining * 1000)

    def named(self, resource: Any) -> str:
        """The broker's name of a topic or a group: that of a namespace begins with it and a %.

        What is a group's has the group's whole name in its own: %DLQ%namespace%group. Without a
        name it stays without one.
        """
        name = str(resource.name)
        namespace = resource.resource_namespace or self.namespace
        if not (namespace and name):  # what has no name is nothing, in a namespace too
            return name
        for prefix in (DLQ_PREFIX, RETRY_PREFIX):
            if name.startswith(prefix):
                return f"{prefix}{namespace}%{name.removeprefix(prefix)}"
        return f"{namespace}%{name}"


def metadata_of(call: Any) -> dict[str, str]:
    """The texts among the metadata of a call; of a key that is there twice, the last."""
    return {key: value for key, value in call.invocation_metadata() if isinstance(value, str)}


def caller_of(call: Any, metadata: dict[str, str], *, user: Principal | None) -> Caller:
    """The caller of a call.

    Raises:
        ClientIdRequiredError: it does not say who it is.
    """
    client_id = metadata.get("x-mq-client-id", "").strip()
    if not client_id:
        raise ClientIdRequiredError("The call has no x-mq-client-id.")
    return Caller(
        client_id=client_id,
        language=metadata.get("x-mq-language", ""),
        namespace=metadata.get("x-mq-namespace", ""),
        user=user,
        call=call,
    )
