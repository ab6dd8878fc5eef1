"""The page's web server: a thread of ``rmq up`` or ``rmq ui``."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import uvicorn

from rmq_pipeline.access.source import check_free, is_loopback, listening, split_address
from rmq_pipeline.clock import Deadline
from rmq_pipeline.errors import OperatorError, RocketMQError, UnauthorizedError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.web import app
from rmq_pipeline.web.sessions import Connect, Sessions

log = logging.getLogger(__name__)

#: Where the page is served by default.
DEFAULT_ADDRESS: Final = "127.0.0.1:8083"
ANY_PORT: Final = "127.0.0.1:0"
#: Time for the server to start, and for open pages to end.
_START_S: Final = 10.0
_STOP_S: Final = 2
#: Connections at a time; a further one is answered 503.
_CONNECTIONS: Final = 100
#: Time for which a page waits for a broker that restarts.
_RETRY_S: Final = 3.0


@dataclass(frozen=True)
class Where:
    """The broker that the page shows: its address, or else its home."""

    address: str | None = None
    home: Path | None = None
    certificate: Path | None = None

    def connect(self, user: str | None, password: str | None) -> Client:
        """Return a client for a user; without one, a client without credentials."""
        return Client(
            self.address,
            home=self.home,
            user=user,
            password=password,
            certificate=self.certificate,
            retry_s=_RETRY_S,
            anonymous=True,
        )


def has_access_control(connect: Connect) -> bool:
    """Return True if the broker refuses calls without credentials.

    Raises:
        BrokerUnavailableError: no broker answers.
    """
    client = connect(None, None)
    try:
        client.ping()
    except UnauthorizedError:
        return True
    finally:
        client.close()
    return False


class PageServer:
    """Serves the page until ``stop``."""

    def __init__(
        self,
        connect: Connect,
        address: str = DEFAULT_ADDRESS,
        *,
        insecure: bool = False,
        dagster_url: str | None = None,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        """Check the address; ``start`` listens.

        Args:
            connect: returns a client for a user and password, see ``Where.connect``.
            address: HOST:PORT; port 0 chooses a free port.
            insecure: listen beyond loopback although the broker has no users.
            dagster_url: address of Dagster's UI.
            now_ms: the broker's clock; this machine's by default.

        Raises:
            RequestError: the address is malformed or taken, or is beyond loopback while the broker
                has no users.
            BrokerUnavailableError: the address is beyond loopback, and no broker answers.
        """
        is_beyond = _is_beyond(address)
        has_users = is_beyond and has_access_control(connect)
        guarded = insecure or not is_beyond or has_users
        host, port = listening(address, guarded=guarded)
        check_free(host, port)
        self._host, self._port = host, port
        self._sessions = Sessions(connect)
        application = app.create(
            self._sessions,
            host=host,
            is_open=not has_users,
            dagster_url=dagster_url,
            now_ms=now_ms,
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                application,
                host=host,
                port=port,
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=_CONNECTIONS,
                timeout_graceful_shutdown=_STOP_S,
                ws="none",
                lifespan="off",
            )
        )
        self._thread = threading.Thread(target=self._run, name="rmq-page", daemon=True)
        self._failure: BaseException | None = None

    @property
    def url(self) -> str:
        """Address of the page for a browser."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)  # noqa: S104
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    def start(self) -> Self:
        """Listen.

        Raises:
            OperatorError: the server did not start.
        """
        self._thread.start()
        deadline = Deadline(_START_S)
        while not self._server.started:
            if not self._thread.is_alive() or deadline.left_s <= 0:
                raise OperatorError(
                    f"The page's server did not start at {self._host}:{self._port}:"
                    f" {self._failure or 'no answer'}.",
                    remedy="Choose another address with --ui, or --ui none.",
                )
            self._thread.join(0.02)
        sockets = self._server.servers[0].sockets
        self._port = int(sockets[0].getsockname()[1])
        return self

    def _run(self) -> None:
        try:
            self._server.run()
        except BaseException as error:  # noqa: BLE001 - also SystemExit, by which uvicorn reports
            self._failure = error

    def stop(self) -> None:
        """Close open pages and stop listening."""
        self._server.should_exit = True
        # Ends running calls, so that no thread waits for a broker that does not answer.
        with suppress(RocketMQError):
            self._sessions.close()
        if self._thread.is_alive():
            self._thread.join(_STOP_S + 5.0)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _is_beyond(address: str) -> bool:
    return not is_loopback(split_address(address)[0])
