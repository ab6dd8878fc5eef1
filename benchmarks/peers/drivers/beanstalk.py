"""beanstalkd, with requests that do not wait for each other's answers."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from benchmarks.peers.driver import LEASE_S, NOTHING, Connection, Driver, Kind, Offer, Received
from benchmarks.peers.pinned import Server
from tests.free_address import free_port


class Beanstalk(Driver):
    """A tube per topic."""

    name = "beanstalkd"
    durability = "binlog with -f0: fsync of each write; a reserve is not written"
    offers: ClassVar[frozenset[Offer]] = frozenset(
        {Offer.STORAGE, Offer.TIMERS, Offer.LARGE_RECEIVES}
    )

    @classmethod
    def missing(cls) -> str | None:
        """Return the missing program."""
        return None if shutil.which("beanstalkd") else "beanstalkd is not installed"

    def start(self, folder: Path) -> None:
        """Start a server with a log."""
        told = subprocess.run(["beanstalkd", "-v"], check=True, capture_output=True, text=True)
        self.version = told.stdout.split()[-1]
        self._port = free_port()
        (folder / "log").mkdir()
        command = ["beanstalkd", "-l", "127.0.0.1", "-p", str(self._port), "-b", "log", "-f0"]
        self._server = Server(command, port=self._port, folder=folder)

    def pids(self) -> Sequence[int]:
        """Return the server."""
        return [self._server.process.pid]

    def create(self, topic: str, groups: Sequence[str], *, kind: Kind) -> None:
        """Do nothing: a tube comes with its first job."""

    def drop(self, topic: str) -> None:
        """Do nothing: an empty tube goes by itself."""

    def connect(self) -> Connection:
        """Return a connection."""
        return _BeanstalkConnection(self._port)

    def stop(self) -> None:
        """Stop the server."""
        self._server.stop()


class _BeanstalkConnection(Connection):
    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb", buffering=1 << 16)
        self._used = self._watched = ""

    def send(
        self,
        topic: str,
        bodies: Sequence[bytes],
        *,
        keys: Sequence[int] = (),
        due_ms: Sequence[int] = (),
    ) -> None:
        if self._used != topic:
            self._ask(b"use %s\r\n" % topic.encode(), b"USING")
            self._used = topic
        now_ms = time.time() * 1000
        # Delays are whole seconds: the next one, so that no message is early.
        delays = [int((due - now_ms) / 1000) + 1 for due in due_ms] or [0] * len(bodies)
        self._socket.sendall(
            b"".join(
                b"put 0 %d %d %d\r\n%s\r\n" % (delay, LEASE_S, len(body), body)
                for body, delay in zip(bodies, delays, strict=True)
            )
        )
        for _ in bodies:
            self._answer(b"INSERTED")

    def receive(self, topic: str, group: str, *, limit: int, wait_s: float) -> Received:
        if self._watched != topic:
            self._ask(b"watch %s\r\n" % topic.encode(), b"WATCHING")
            self._ask(b"ignore %s\r\n" % (self._watched or "default").encode(), b"WATCHING")
            self._watched = topic
        # The first one waits, in whole seconds; the others do not.
        wait = b"reserve-with-timeout %d\r\n" % max(1, round(wait_s))
        self._socket.sendall(wait)
        first = self._reserved()
        if first is None:
            return NOTHING
        self._socket.sendall(b"reserve-with-timeout 0\r\n" * (limit - 1))
        others = [self._reserved() for _ in range(limit - 1)]
        found = [first, *(each for each in others if each)]
        return Received([body for _, body in found], [job for job, _ in found])

    def ack(self, received: Received, failed: Sequence[int] = ()) -> None:
        self._socket.sendall(b"".join(b"delete %s\r\n" % job for job in received.handle))
        for _ in received.handle:
            self._answer(b"DELETED")

    def close(self) -> None:
        self._answers.close()
        self._socket.close()

    def _reserved(self) -> tuple[bytes, bytes] | None:
        line = self._answers.readline()
        if line == b"TIMED_OUT\r\n":
            return None
        word, job, size = line.split()
        assert word == b"RESERVED", line
        return job, self._answers.read(int(size) + 2)[:-2]

    def _ask(self, command: bytes, expected: bytes) -> None:
        self._socket.sendall(command)
        self._answer(expected)

    def _answer(self, expected: bytes) -> None:
        line = self._answers.readline()
        if not line.startswith(expected):
            raise RuntimeError(f"beanstalkd answered {line!r}.")
