"""Frames of calls over a plain connection: what both ends of it share.

A small call costs gRPC several times the work of the broker: its threads, its HTTP/2 frames and
its headers on each call. Over a plain connection the caller writes its headers once, and then one
call after the other; one thread at each end does all of it.

* Greeting: ``MAGIC`` and the first half of the key that the broker gave with its port. The broker
  answers with the other half: no other program gets the headers, which may have a password. The
  caller then sends their length in 4 bytes, and the headers as JSON. The answer to these is an
  answer as below, without pieces; or a refusal, and then the connection ends.
* Call: the length of its command and that of its body, 4 bytes each; the command (see ``wire``);
  the body.
* Answer: each piece of it with its length in 4 bytes, and 4 bytes of zeros at the end.

All lengths are little endian. The ends of a connection are of one version of the library, as those
of Flight are: a broker that knows no plain connections does not name a port for them.
"""

import os
import select
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import pyarrow as pa

from rmq_pipeline.clock import Deadline

MAGIC: Final = b"RMQ/TCP1"
#: Bytes of the headers of a greeting.
HEADERS_BYTES: Final = 16 * 1024
#: Longer commands and bodies are calls of Flight.
COMMAND_BYTES: Final = 64 * 1024
BODY_BYTES: Final = 1024 * 1024
#: Action of Flight whose answer is the port in 4 bytes and a key; empty if there is none.
PORT_ACTION: Final = "tcp_port"
#: A key is of one start of a broker; each side proves that it knows it by one half.
KEY_BYTES: Final = 32

LENGTH: Final = struct.Struct("<I")
LENGTHS: Final = struct.Struct("<II")
END: Final = LENGTH.pack(0)
#: Bytes that are asked for in one read at least, and at most.
_READ_BYTES: Final = 64 * 1024
_READ_MOST_BYTES: Final = 1024 * 1024
_EMPTY: Final = memoryview(b"")
#: Silence after which a peer is asked for a sign of life, if somebody can.
_SILENT_S: Final = 1.0
#: A socket takes no shorter time than this for one that waits.
_LEAST_S: Final = 0.001
_FOREVER_S: Final = 86_400.0
_MORE: Final = getattr(socket, "MSG_MORE", 0)
#: A peer that has ended the connection; not known everywhere.
_HUNG_UP: Final = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class Stream:
    """Reads and writes one connection; for one thread at a time, except ``is_open`` and ``end``."""

    def __init__(self, connected: socket.socket) -> None:
        """Take over a connected socket."""
        self._socket = connected
        self._rest = _EMPTY
        #: A forked process must not end the connection of its parent.
        self._pid = os.getpid()
        self._wait_s: float | None = connected.gettimeout()
        #: Asks the peer for a sign of life, and raises if it gives none. A process that stands
        #: still closes nothing, and its kernel answers for it.
        self.ask: Callable[[], None] | None = None
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def encrypt(self, context: ssl.SSLContext, *, server_name: str | None = None) -> None:
        """Begin TLS: as the server, or as a client that expects a server of this name."""
        is_server = server_name is None
        encrypted = context.wrap_socket(
            self._socket,
            server_side=is_server,
            server_hostname=server_name,
            do_handshake_on_connect=False,  # ``end`` has to find the socket meanwhile
        )
        self._socket = encrypted
        encrypted.do_handshake()

    def watch(self, *, silent_s: int, again_s: int, times: int) -> None:
        """Notice a peer whose machine is gone, where the system can.

        Args:
            silent_s: silence before the first question for a sign of life.
            again_s: time between two of them.
            times: questions without an answer that end the connection.
        """
        lost_ms = 1000 * (silent_s + again_s * times)
        for name, value in (
            ("TCP_KEEPIDLE", silent_s),
            ("TCP_KEEPINTVL", again_s),
            ("TCP_KEEPCNT", times),
            ("TCP_USER_TIMEOUT", lost_ms),
        ):
            if hasattr(socket, name):
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def is_own(self) -> bool:
        """False in a process that was forked after the connection was made."""
        return self._pid == os.getpid()

    def wait_at_most(self, seconds: float) -> None:
        """Limit the time of each read and write that follows."""
        if seconds != self._wait_s:
            self._socket.settimeout(seconds)
            self._wait_s = seconds

    def read(self, size: int, *, until: Deadline | None = None) -> bytes:
        """Return exactly so many bytes.

        Args:
            size: the bytes.
            until: for all of them together.

        Raises:
            EOFError: the peer has ended the connection before.
            OSError: the connection is broken; TimeoutError if the time is over.
        """
        if len(self._rest) >= size:
            return bytes(self._taken(size))
        joined = bytearray(self._taken(len(self._rest)))
        while len(joined) < size:
            if until is not None:
                self.wait_at_most(max(until.left_s, _LEAST_S))
            joined += self._received(max(size - len(joined), _READ_BYTES))
        self._rest = memoryview(bytes(joined))
        return bytes(self._taken(size))

    def read_some(self, most: int) -> memoryview:
        """Return what has arrived, at least one byte, at most so many; raises as ``read``."""
        if not self._rest:
            self._rest = memoryview(self._received(most))
        return self._taken(most)

    def _taken(self, most: int) -> memoryview:
        # An empty view would keep the memory of the whole.
        taken, rest = self._rest[:most], self._rest[most:]
        self._rest = rest or _EMPTY
        return taken

    def _received(self, most: int) -> bytes:
        if self.ask is not None:
            until = Deadline(self._wait_s or _FOREVER_S)
            while not self._has_data() and not until.is_over:
                self.ask()
        if not (data := self._socket.recv(min(most, _READ_MOST_BYTES))):
            raise EOFError("The other end has closed the connection.")
        return data

    def _has_data(self) -> bool:
        """Wait a moment for data; return True if there are some, or the end."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | _HUNG_UP)
        return bool(poll.poll(_SILENT_S * 1000))

    def write(self, *data: bytes | memoryview | pa.Buffer, more: bool = False) -> None:
        """Write all bytes; raises OSError.

        Args:
            data: pieces, in order.
            more: the next bytes follow at once, so that one packet takes both.
        """
        whole = data[0] if len(data) == 1 else b"".join(map(memoryview, data))
        flags = _MORE if more and not isinstance(self._socket, ssl.SSLSocket) else 0
        self._socket.sendall(whole, flags)

    def is_open(self) -> bool:
        """Return False once the peer has ended the connection; reads nothing."""
        poll = select.poll()  # one that two threads share refuses the second of them
        try:
            poll.register(self._socket, select.POLLIN | _HUNG_UP)
        except (OSError, ValueError):  # closed here
            return False
        for _, event in poll.poll(0):
            if event & (_HUNG_UP | select.POLLNVAL):
                return False
            try:
                # Below TLS, too: the method of a TLS socket takes no flags.
                return bool(socket.socket.recv(self._socket, 1, socket.MSG_PEEK))
            except OSError:
                return False
        return True

    def end(self) -> None:
        """End the connection; the thread that reads it gets the end, and closes it."""
        with suppress(OSError):
            if self.is_own:
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; for the thread that uses it, or if none does."""
        self.end()
        with suppress(OSError):
            self._socket.close()
