"""Plain connections of a client to one broker; see ``tcp_stream`` for why, and for their frames."""

import hmac
import json
import logging
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import pyarrow as pa

from rmq_pipeline.clock import Deadline
from rmq_pipeline.flight.framing import Part
from rmq_pipeline.flight.tcp_stream import (
    BODY_BYTES,
    COMMAND_BYTES,
    HEADERS_BYTES,
    KEY_BYTES,
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

#: A broker that answers nothing is asked for signs of life after so many seconds, so often.
_SIGNS: Final = {"silent_s": 5, "again_s": 1, "times": 2}
#: Bytes of a body if the broker is asked for signs of life.
_WATCHED_BYTES: Final = 64 * 1024
#: Longest refusal of a greeting.
_REFUSAL_BYTES: Final = 64 * 1024
#: Time to read the refusal of a call that could not be written to its end.
_REFUSAL_S: Final = 1.0


class NoTcpError(Exception):
    """The broker takes no plain connection; the call was not sent."""


class TcpClient:
    """Calls one broker over plain connections, one for each call under way. Thread-safe."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        key: bytes,
        headers: Mapping[str, str],
        encryption: ssl.SSLContext | None = None,
        server_name: str | None = None,
        ask: Callable[[], None] | None = None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            host: of the broker.
            port: of its plain connections.
            key: of its start, which came with the port.
            headers: name the caller.
            encryption: None: no TLS.
            server_name: that the certificate must have; None: the host.
            ask: asks the broker for a sign of life in another way, and raises if it gives none;
                None: a call waits as long as it may.
        """
        self._address = host.strip("[]"), port
        said = json.dumps(dict(headers)).encode()
        self._headers = LENGTH.pack(len(said)) + said
        self._fits = len(said) <= HEADERS_BYTES
        self._greeting = MAGIC + key[: KEY_BYTES // 2]
        self._proof = key[KEY_BYTES // 2 :]
        self._encryption = encryption
        self._server_name = server_name or self._address[0]
        self._ask = ask
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[tuple[Stream, float]] = []
        # A client that is never closed, or one whose broker has gone, leaves no connection open.
        weakref.finalize(self, _close, self._idle)
        #: With a call that may take long.
        self._slow: set[Stream] = set()
        self._closed = False

    def takes(self, command: bytes, body_bytes: int) -> bool:
        """Return True if a call is short enough."""
        # A larger body may not fit into the buffers between here and a broker that stands still.
        most = BODY_BYTES if self._ask is None else _WATCHED_BYTES
        return self._fits and len(command) <= COMMAND_BYTES and body_bytes <= most

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
        if self._pid != os.getpid():
            self._begin_in_fork()
        stream = self._fresh() or self._connected()
        done, until = False, Deadline(timeout_s)
        try:
            with self._watched(stream, is_quick=is_quick):
                stream.wait_at_most(timeout_s)
                try:
                    stream.write(lengths, command, *body)
                except ConnectionError:
                    # A refused caller may read why, though the broker reads no more.
                    return _answer(stream, Deadline(_REFUSAL_S))
                answer = _answer(stream, until)
            done = True
            return answer
        finally:
            self._give_back(stream, reusable=done)

    def _begin_in_fork(self) -> None:
        """Leave the connections to the parent process, and the lock, which it may have held."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._slow = set()
        _close(self._idle)

    def close(self) -> None:
        """Close idle connections and those of calls that may take long; quick calls finish."""
        with self._lock:
            self._closed = True
            slow = list(self._slow)
        _close(self._idle)
        for stream in slow:
            stream.end()

    def _fresh(self) -> Stream | None:
        """Return an open connection that was used recently."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                stream, since_s = self._idle.pop()
            is_fresh = time.monotonic() - since_s < _FRESH_S
            if stream.is_own and is_fresh and stream.is_open():
                return stream
            stream.close()

    def _connected(self) -> Stream:
        """Return a new connection that the broker has accepted.

        Raises:
            NoTcpError: there is none.
        """
        try:
            stream = Stream(socket.create_connection(self._address, timeout=_CONNECT_S))
        except OSError as error:
            raise NoTcpError(f"{self._address} cannot be reached: {error}") from error
        greeted = False
        try:
            self._greet(stream)
            greeted = True
        except (OSError, EOFError, ValueError) as error:
            raise NoTcpError(f"{self._address} takes no connection: {error}") from error
        finally:
            if not greeted:
                stream.close()
        return stream

    def _greet(self, stream: Stream) -> None:
        """Make sure that the broker is the one that gave the key, and name the caller.

        Raises:
            OSError, EOFError, ValueError: it is another program, or refuses the caller.
        """
        if self._ask is not None:
            stream.watch(**_SIGNS)
            stream.ask = self._ask
        if self._encryption is not None:
            stream.encrypt(self._encryption, server_name=self._server_name)
        until = Deadline(_CONNECT_S)
        stream.write(self._greeting)
        if not hmac.compare_digest(stream.read(len(self._proof), until=until), self._proof):
            raise ValueError("it is another program")
        stream.write(self._headers)
        refusal = _answer(stream, until, most=_REFUSAL_BYTES)
        if refusal:
            raise ValueError(refusal[0].to_pybytes().decode())

    def _give_back(self, stream: Stream, *, reusable: bool) -> None:
        with self._lock:
            now_s = time.monotonic()
            old = []
            while self._idle and now_s - self._idle[0][1] > _FRESH_S:
                old.append(self._idle.pop(0)[0])
            if reusable and not self._closed:
                self._idle.append((stream, now_s))
            else:
                old.append(stream)
        for each in old:
            each.close()

    @contextmanager
    def _watched(self, stream: Stream, *, is_quick: bool) -> Iterator[None]:
        """Let ``close`` cancel the call of the block, unless it is quick."""
        if is_quick:
            yield
            return
        with self._lock:
            if self._closed:
                raise NoTcpError("The client is closed.")
            self._slow.add(stream)
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


def _answer(stream: Stream, until: Deadline, *, most: int | None = None) -> list[pa.Buffer]:
    """Read the pieces of an answer.

    Raises:
        ValueError: a piece has more than ``most`` bytes.
    """
    pieces = []
    while size := LENGTH.unpack(stream.read(LENGTH.size, until=until))[0]:
        if most is not None and size > most:
            raise ValueError(f"its answer has {size} bytes")
        pieces.append(pa.py_buffer(stream.read(size, until=until)))
    return pieces
