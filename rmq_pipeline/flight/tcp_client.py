"""Plain connections of a client to one broker; see ``tcp_stream`` for why, and for their frames."""

import json
import logging
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import pyarrow as pa

from rmq_pipeline.clock import Deadline
from rmq_pipeline.flight.framing import Part
from rmq_pipeline.flight.tcp_stream import (
    BODY_BYTES,
    COMMAND_BYTES,
    HEADERS_BYTES,
    LENGTH,
    LENGTHS,
    MAGIC,
    Stream,
)

log = logging.getLogger(__name__)

#: Longest wait for a connection. Another network may let only the ports of gRPC through.
_CONNECT_S: Final = 1.0
#: Connections that are idle for longer are not used again: the broker closes them after twice that.
_FRESH_S: Final = 30.0

#: Options of Linux, in seconds and attempts, and the last one in milliseconds.
_SIGNS_OF_LIFE: Final = {
    getattr(socket, name): value
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", 5_000),
    )
    if hasattr(socket, name)
}


class NoTcpError(Exception):
    """The broker takes no plain connection; the call was not sent."""


class TcpClient:
    """Calls one broker over plain connections, one for each call under way. Thread-safe."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        headers: Mapping[str, str],
        encryption: ssl.SSLContext | None = None,
        server_name: str | None = None,
        is_watched: bool = False,
    ) -> None:
        """Connect to nothing yet.

        Args:
            host: of the broker.
            port: of its plain connections.
            headers: name the caller.
            encryption: None: no TLS.
            server_name: that the certificate must have; None: the host.
            is_watched: notice within seconds a machine that is gone.
        """
        self._address = host.strip("[]"), port
        greeting = json.dumps(dict(headers)).encode()
        self._greeting = b"".join((MAGIC, LENGTH.pack(len(greeting)), greeting))
        self._fits = len(greeting) <= HEADERS_BYTES
        self._encryption = encryption
        self._server_name = server_name or host
        self._is_watched = is_watched
        self._lock = threading.Lock()
        self._idle: list[tuple[Stream, float]] = []
        # A client that is never closed, or one whose broker has gone, leaves no connection open.
        weakref.finalize(self, _close, self._idle)
        #: With a call that may take long.
        self._slow: set[Stream] = set()
        self._closed = False

    def takes(self, command: bytes, body_bytes: int) -> bool:
        """Return True if a call is short enough."""
        return self._fits and len(command) <= COMMAND_BYTES and body_bytes <= BODY_BYTES

    def call(
        self, command: bytes, parts: Sequence[Part], *, timeout_s: float, is_quick: bool
    ) -> list[pa.Buffer]:
        """Make a call; return the pieces of its answer.

        Args:
            command: see ``wire``.
            parts: the tables of its body.
            timeout_s: for the answer.
            is_quick: ``close`` lets it finish.

        Raises:
            NoTcpError: the call was not sent.
            OSError: the connection was lost, or the time is over.
            EOFError: the broker ended the connection.
        """
        body = [data for _, data in parts]
        lengths = LENGTHS.pack(len(command), sum(data.size for data in body))
        stream = self._fresh() or self._connected()
        done = False
        try:
            with self._watched(stream, is_quick=is_quick):
                stream.write(lengths, command, *body)
                answer = _answer(stream, Deadline(timeout_s))
            done = True
            return answer
        finally:
            self._give_back(stream, reusable=done)

    def close(self) -> None:
        """Close idle connections and those of calls that may take long; quick calls finish."""
        with self._lock:
            self._closed = True
            slow = list(self._slow)
        _close(self._idle)
        for stream in slow:
            stream.close()

    def _fresh(self) -> Stream | None:
        """Return an open connection that was used recently."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                stream, since_s = self._idle.pop()
            if time.monotonic() - since_s < _FRESH_S and stream.is_open():
                return stream
            stream.close()

    def _connected(self) -> Stream:
        """Return a new connection that the broker has accepted.

        Raises:
            NoTcpError: there is none.
        """
        try:
            connected = socket.create_connection(self._address, timeout=_CONNECT_S)
            stream = Stream(connected)
            if self._is_watched:
                for option, seconds in _SIGNS_OF_LIFE.items():
                    connected.setsockopt(socket.IPPROTO_TCP, option, seconds)
        except OSError as error:
            raise NoTcpError(f"{self._address} cannot be reached: {error}") from error
        try:
            if self._encryption is not None:
                stream.encrypt(self._encryption, server_name=self._server_name)
            stream.write(self._greeting)
            refusal = _answer(stream, Deadline(_CONNECT_S))
        except (OSError, EOFError) as error:
            stream.close()
            raise NoTcpError(f"{self._address} takes no connection: {error}") from error
        if refusal:
            stream.close()
            raise NoTcpError(refusal[0].to_pybytes().decode())
        return stream

    def _give_back(self, stream: Stream, *, reusable: bool) -> None:
        with self._lock:
            if reusable and not self._closed:
                self._idle.append((stream, time.monotonic()))
                return
        stream.close()

    @contextmanager
    def _watched(self, stream: Stream, *, is_quick: bool) -> Iterator[None]:
        """Let ``close`` cancel the call of the block, unless it is quick."""
        if is_quick:
            yield
            return
        with self._lock:
            self._slow.add(stream)
            if self._closed:
                raise NoTcpError("The client is closed.")
        try:
            yield
        finally:
            with self._lock:
                self._slow.discard(stream)


def _close(idle: list[tuple[Stream, float]]) -> None:
    """Close connections without a call."""
    with suppress(IndexError):  # another thread took the last one
        while idle:
            idle.pop()[0].close()


def _answer(stream: Stream, until: Deadline) -> list[pa.Buffer]:
    """Read the pieces of an answer."""
    pieces = []
    while size := LENGTH.unpack(stream.read(LENGTH.size, until=until))[0]:
        pieces.append(pa.py_buffer(stream.read(size, until=until)))
    return pieces
