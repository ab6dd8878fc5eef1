"""The disk alone, the limit of the peers: one synced write a call, as the commit log writes."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from benchmarks.peers.driver import Connection, Driver, Kind, Offer, Received

#: The file is written over and over: its blocks have been written before, as those of the log.
_FILE_BYTES: Final = 64 << 20
#: An ack writes this much per message: its offset and its key.
_ACK_BYTES: Final = 16


class RawDisk(Driver):
    """A preallocated file of zeros, written with RWF_DSYNC."""

    name = "raw disk"
    durability = "pwritev with RWF_DSYNC; eight producers share one write"
    offers: ClassVar[frozenset[Offer]] = frozenset({Offer.LARGE_RECEIVES})
    shares_writes = True
    version = f"Linux {platform.release().partition('-')[0]}"

    def start(self, folder: Path) -> None:
        """Write the zeros."""
        self._path = folder / "disk"
        self._path.write_bytes(bytes(_FILE_BYTES))

    def pids(self) -> Sequence[int]:
        """Return none: it has no server."""
        return []

    def create(self, topic: str, groups: Sequence[str], *, kind: Kind) -> None:
        """Do nothing."""

    def connect(self) -> Connection:
        """Return a descriptor of the file."""
        return _DiskConnection(self._path)

    def drop(self, topic: str) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


class _DiskConnection(Connection):
    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY)
        self._at = 0
        self._bodies: list[bytes] = []

    def send(
        self,
        topic: str,
        bodies: Sequence[bytes],
        *,
        keys: Sequence[int] = (),
        due_ms: Sequence[int] = (),
    ) -> None:
        self._write(b"".join(bodies))

    def receive(self, topic: str, group: str, *, limit: int, wait_s: float) -> Received:
        if len(self._bodies) != limit:
            self._bodies = [b""] * limit
        return Received(self._bodies)

    def ack(self, received: Received, failed: Sequence[int] = ()) -> None:
        self._write(bytes(_ACK_BYTES * len(received.bodies)))

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, data: bytes) -> None:
        if self._at + len(data) > _FILE_BYTES:
            self._at = 0
        os.pwritev(self._descriptor, [data], self._at, os.RWF_DSYNC)
        self._at += len(data)
