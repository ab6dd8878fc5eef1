"""Limit on the connections of the endpoints, so that the store always has file descriptors.

Flight's Python server has no limit of its own. The guard first closes connections that have never
sent a byte, then those with the longest silence. A live client reconnects.
"""

import contextlib
import logging
import os
import resource
import socket
import struct
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from rmq_pipeline.store import descriptors

log = logging.getLogger(__name__)

#: Interval between two checks.
_LOOK_S: Final = 0.25
#: Descriptors reserved for other files: commit log, database, open segments.
_FILES: Final = 256
_DESCRIPTORS: Final = "/proc/self/fd"
#: Format and byte offset of two fields of Linux's struct tcp_info: tcpi_last_data_recv (ms since
#: the last received data) and tcpi_bytes_received.
_SILENT_MS: Final = (struct.Struct("=I"), 52)
_RECEIVED: Final = (struct.Struct("=Q"), 128)
_INFO_BYTES: Final = 192


class _Connection(NamedTuple):
    """Accepted connection; sorts in the order of closing."""

    has_spoken: bool
    #: Minus the milliseconds since the last received data: the longest silence sorts first.
    heard_ms: int
    descriptor: int


def most() -> int:
    """Return how many open files the process may have before the guard closes connections."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(limit - _FILES, limit // 2)


class ConnectionGuard:
    """Background thread that closes connections while the process has too many open files."""

    def __init__(self, ports: Collection[int]) -> None:
        """Prepare a guard; it checks nothing before ``start``.

        Args:
            ports: local ports of the endpoints. Connections on other ports stay open.
        """
        self._ports = frozenset(ports)
        self._most = most()
        self._over = threading.Event()
        self._is_tight = False
        self._thread = threading.Thread(target=self._run, name="rmq-connections", daemon=True)

    def start(self) -> None:
        """Start the checks; does nothing on systems without /proc/self/fd."""
        if Path(_DESCRIPTORS).is_dir():
            self._thread.start()

    def guard(self, ports: Collection[int]) -> None:
        """Guard these ports, too."""
        self._ports |= frozenset(ports)

    def stop(self) -> None:
        """End the checks."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            try:
                self.look()
            except Exception:  # if this thread ended, connections could use up all descriptors
                descriptors.use_reserve()
                log.exception("could not count the open connections; retrying")

    def look(self) -> int:
        """Close one connection for each open file above the limit; return how many were closed."""
        try:
            numbers = [int(name) for name in os.listdir(_DESCRIPTORS)]  # noqa: PTH208 only names
        except OSError:
            if not descriptors.use_reserve():
                raise
            numbers = [int(name) for name in os.listdir(_DESCRIPTORS)]  # noqa: PTH208
        excess = len(numbers) - self._most
        if excess <= 0:
            if self._is_tight:
                self._is_tight = False
                descriptors.reserve()
            return 0
        self._is_tight = True
        found = sorted(self._connections(numbers))[:excess]
        for connection in found:
            _shut(connection.descriptor)
        log.warning(
            "closed %d silent connections: %d files are open, the limit is %d",
            *(len(found), len(numbers), self._most),
        )
        return len(found)

    def _connections(self, numbers: Collection[int]) -> list[_Connection]:
        found = []
        for number in numbers:
            with contextlib.suppress(OSError, struct.error), _borrowed(number) as connection:
                if _is_of(connection, self._ports):
                    found.append(_described(connection))
        return found


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Wrap a descriptor in a socket object and leave the descriptor open at the end."""
    found = socket.socket(fileno=number)
    try:
        yield found
    finally:
        found.detach()


def _is_of(connection: socket.socket, ports: Collection[int]) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    return connection.getsockname()[1] in ports


def _described(connection: socket.socket) -> _Connection:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    (silent_ms,) = _SILENT_MS[0].unpack_from(info, _SILENT_MS[1])
    (received,) = _RECEIVED[0].unpack_from(info, _RECEIVED[1])
    return _Connection(received > 0, -silent_ms, connection.fileno())


def _shut(number: int) -> None:
    """Shut a connection down; the server that owns it then closes the descriptor."""
    with contextlib.suppress(OSError), _borrowed(number) as connection:
        connection.shutdown(socket.SHUT_RDWR)
