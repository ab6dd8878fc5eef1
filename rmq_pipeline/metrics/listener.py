"""HTTP listener for scrapes: GET /metrics.

A scrape takes a thread. At most SCRAPES run at once, and each connection is closed after LIFE_S,
however slowly its client reads or writes.
"""

import logging
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any, Final

from typing_extensions import override

from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.access.source import check_free, split_address
from rmq_pipeline.errors import (
    BrokerUnavailableError,
    ForbiddenError,
    RequestError,
    RocketMQError,
    UnauthorizedError,
)
from rmq_pipeline.metrics.exposition import CONTENT_TYPE

log = logging.getLogger(__name__)

SCRAPES: Final = 4
LIFE_S: Final = 10.0
#: Time for a client's next bytes.
_SILENT_S: Final = 5.0
_LOOK_S: Final = 0.25
_BUSY: Final = (
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Retry-After: 1\r\nConnection: close\r\n\r\nToo many scrapes are under way.\n"
)
#: Returns the text for a caller, by its Authorization header and IP address.
Scrape = Callable[[str | None, str], bytes]


def _starting(_authorization: str | None, _peer: str) -> bytes:
    raise BrokerUnavailableError("The broker is starting.")


def _stopping(_authorization: str | None, _peer: str) -> bytes:
    raise BrokerUnavailableError("The broker is stopping.")


class MetricsListener:
    """Listener at one address; it answers 503 before ``serve`` and after ``refuse``."""

    def __init__(self, address: str, *, certificate: Certificate | None = None) -> None:
        """Listen, and answer that the broker is starting.

        Args:
            address: host:port; port 0 chooses a free port.
            certificate: encrypts the connections.

        Raises:
            RequestError: the address is in use.
        """
        host, port = split_address(address)
        check_free(host, port)
        try:
            self._server = _Server(host, port, context=_context(certificate))
        except OSError as error:
            raise RequestError(f"The broker cannot listen at {address}: {error}.") from error
        named = f"[{host}]" if ":" in host else host
        self.address = f"{named}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_S,), name="rmq-metrics", daemon=True
        )
        self._thread.start()

    def serve(self, scrape: Scrape) -> None:
        """Answer with the texts that ``scrape`` returns from now on."""
        self._server.scrape = scrape

    def refuse(self) -> None:
        """Answer that the broker is stopping from now on."""
        self._server.scrape = _stopping

    def shutdown(self) -> None:
        """Close the listener and all connections."""
        self._server.shutdown()
        self._server.end()
        self._thread.join()


def _context(certificate: Certificate | None) -> ssl.SSLContext | None:
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.path, certificate.key_path)
    return context


class _Server(TCPServer):
    """Server with a thread for each connection, up to a number, and for a limited time.

    It is no HTTPServer, which asks the network for the name of the host.
    """

    allow_reuse_address = True
    request_queue_size = 16

    def __init__(self, host: str, port: int, *, context: ssl.SSLContext | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.scrape: Scrape = _starting
        self._context = context
        self._free = threading.BoundedSemaphore(SCRAPES)
        #: Open connections, and when each must be closed.
        self._open: dict[socket.socket, float] = {}
        super().__init__((host, port), _Handler)

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            request.settimeout(0)  # the sentence fits into an empty buffer, so nothing waits
            try:
                # A client that expects TLS cannot read it; it sees a closed connection.
                request.send(_BUSY)
            except OSError as error:
                log.debug("a refused scrape has gone: %s", error)
            self.shutdown_request(request)
            return
        self._open[request] = time.monotonic() + LIFE_S
        thread = threading.Thread(
            target=self._answer, args=(request, client_address), name="rmq-scrape", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the system allows no more threads; the base class closes it
            del self._open[request]
            self._free.release()
            raise

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        log.warning("a scrape of %s could not be answered: %s", client_address, sys.exception())

    def _answer(self, request: socket.socket, client_address: Any) -> None:
        try:
            request.settimeout(_SILENT_S)
            spoken = request
            if self._context is not None:
                spoken = self._context.wrap_socket(request, server_side=True)
                self._open[spoken] = self._open.pop(request)
                request = spoken
            self.finish_request(spoken, client_address)
        except OSError as error:  # TLS failed, or the client was too slow or has gone
            log.debug("a scrape has ended early: %s", error)
        finally:
            self._open.pop(request, None)
            self.shutdown_request(request)
            self._free.release()

    @override
    def service_actions(self) -> None:
        """End connections that have lasted too long; their threads see a closed connection."""
        now = time.monotonic()
        for connection, until in list(self._open.items()):
            if now >= until:
                _cut(connection)

    def end(self) -> None:
        """Close the listener, and cut all connections."""
        self.server_close()
        for connection in list(self._open):
            _cut(connection)


def _cut(connection: socket.socket) -> None:
    try:
        # Not the method of an SSL socket, which its thread is using.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError as error:
        log.debug("a scrape has ended by itself: %s", error)


class _Handler(BaseHTTPRequestHandler):
    """One request of a connection."""

    server: _Server
    timeout = _SILENT_S
    server_version = "rmq"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a scrape."""
        if self.path.partition("?")[0] != "/metrics":
            self._say(HTTPStatus.NOT_FOUND, "The metrics are at /metrics.")
            return
        try:
            text = self.server.scrape(self.headers.get("Authorization"), self.client_address[0])
        except UnauthorizedError as error:
            self._say(
                HTTPStatus.UNAUTHORIZED, str(error), ("WWW-Authenticate", 'Basic realm="rmq"')
            )
        except ForbiddenError as error:
            self._say(HTTPStatus.FORBIDDEN, str(error))
        except RocketMQError as error:
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, error.message)
        except Exception:
            log.exception("A scrape has failed.")
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, "The scrape has failed; see the log.")
        else:
            self._send(HTTPStatus.OK, text, ("Content-Type", CONTENT_TYPE))

    do_HEAD = do_GET  # noqa: N815 the name is http.server's

    def _say(self, status: HTTPStatus, sentence: str, *headers: tuple[str, str]) -> None:
        text = f"{sentence}\n".encode()
        self._send(status, text, ("Content-Type", "text/plain; charset=utf-8"), *headers)

    def _send(self, status: HTTPStatus, text: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(text))), ("Connection", "close")):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        log.debug("scrape: " + format, *args)  # noqa: G003 the format is http.server's
