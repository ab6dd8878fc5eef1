"""litequeue: a table in SQLite, in the client's process."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Final

from litequeue import LiteQueue

from benchmarks.peers.driver import NOTHING, POLL_S, Connection, Driver, Kind, Offer, Received

#: How long a connection waits for another one's transaction.
_BUSY_S: Final = 60.0


class Lite(Driver):
    """A file per topic."""

    name = "litequeue"
    durability = "SQLite, WAL, synchronous FULL; pop and ack too"
    offers: ClassVar[frozenset[Offer]] = frozenset({Offer.STORAGE, Offer.LARGE_RECEIVES})
    version = f"{version('litequeue')}, SQLite {sqlite3.sqlite_version}"

    def start(self, folder: Path) -> None:
        """Note where files go."""
        self._folder = folder

    def pids(self) -> Sequence[int]:
        """Return none: it has no server."""
        return []

    def create(self, topic: str, groups: Sequence[str], *, kind: Kind) -> None:
        """Make the file."""
        _LiteConnection(self._folder / topic).close()

    def drop(self, topic: str) -> None:
        """Delete the file."""
        for path in self._folder.glob(f"{topic}*"):
            path.unlink()

    def connect(self) -> Connection:
        """Return a connection to the files."""
        return _LiteConnections(self._folder)

    def connect_to_check(self) -> Connection:
        """Return a connection that reads in order, but pops nothing.

        A pop takes longer the more messages there are: popping all would take hours.
        """
        return _LiteReader(self._folder)

    def stop(self) -> None:
        """Do nothing."""


class _LiteConnection:
    """A queue of one file."""

    def __init__(self, path: Path) -> None:
        self.queue: Any = LiteQueue(path, timeout=_BUSY_S)
        self.queue.conn.execute("PRAGMA synchronous = FULL")

    def close(self) -> None:
        """Close the file."""
        self.queue.close()


class _LiteConnections(Connection):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, _LiteConnection] = {}

    def send(
        self,
        topic: str,
        bodies: Sequence[bytes],
        *,
        keys: Sequence[int] = (),
        due_ms: Sequence[int] = (),
    ) -> None:
        queue = self._queue(topic)
        if len(bodies) == 1:
            queue.put(bodies[0])
            return
        with queue.transaction(mode="IMMEDIATE"):
            for body in bodies:
                queue.put(body)

    def receive(self, topic: str, group: str, *, limit: int, wait_s: float) -> Received:
        queue = self._queue(topic)
        until = time.perf_counter() + wait_s
        # pop() begins a transaction of its own, so a receive of many is many transactions.
        while (first := queue.pop()) is None:
            if time.perf_counter() >= until:
                return NOTHING
            time.sleep(POLL_S)
        found = [first]
        while len(found) < limit and (message := queue.pop()) is not None:
            found.append(message)
        ids = [message.message_id for message in found]
        return Received([message.data for message in found], (queue, ids))

    def ack(self, received: Received, failed: Sequence[int] = ()) -> None:
        queue, ids = received.handle
        with queue.transaction(mode="IMMEDIATE"):
            for each in ids:
                queue.done(each)

    def close(self) -> None:
        for each in self._open.values():
            each.close()

    def _queue(self, topic: str) -> Any:
        if topic not in self._open:
            self._open[topic] = _LiteConnection(self._folder / topic)
        return self._open[topic].queue


class _LiteReader(_LiteConnections):
    """Reads a queue from its first message on."""

    _read = 0

    def receive(self, topic: str, group: str, *, limit: int, wait_s: float) -> Received:
        query = "SELECT rowid, data FROM Queue WHERE rowid > ? ORDER BY rowid LIMIT ?"
        rows = self._queue(topic).conn.execute(query, [self._read, limit]).fetchall()
        if rows:
            self._read = rows[-1][0]
        return Received([row[1] for row in rows])

    def ack(self, received: Received, failed: Sequence[int] = ()) -> None:
        """Do nothing."""
