"""Interface to a store of the commit log outside the home: compare-and-append at a position.

The store decides who leads. A broker claims a new epoch, and from then on no append of an older
epoch succeeds. A position takes one frame, so the log never has two histories. The lease only says
when another broker should try to lead: a wrong clock costs time, never a message.

The files in the home are a copy of the store, and everybody reads them. See replication.py for the
order of both writes. Engines: postgres_store.py, object_store_log.py and jetstream_log.py.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol


class Stored(NamedTuple):
    """A frame in the store, without its bytes."""

    position: int
    length: int
    #: CRC-32 of the whole frame.
    crc: int

    @property
    def end(self) -> int:
        """Position of the next frame."""
        return self.position + self.length


class Layout(NamedTuple):
    """Version and columns of the frames from a position on: what a log file's header says."""

    start: int
    version: int
    fingerprint: bytes

    def is_as(self, other: "Layout | None") -> bool:
        """Return True if frames of both are read alike."""
        return other is not None and self[1:] == other[1:]


class Lease(NamedTuple):
    """The last lease of the log."""

    #: Host and process of the broker that took it; empty if none did.
    holder: str
    #: False: another broker may try to lead.
    runs: bool


class LogStore(Protocol):
    """One log outside the home. All methods raise LogStoreError if the store does not answer.

    ``begin``, ``finish`` and ``settle`` are for one thread at a time. So are the methods that read,
    while no thread appends. ``renew``, ``put_file`` and ``trim`` are safe for all threads.
    """

    #: Address without secrets, for people.
    address: str
    #: Name of this log; every store is made with another one.
    id: str
    #: Seed of the CRCs in the log's headers.
    seed: int
    #: Number of the current leadership; higher than all before.
    epoch: int
    #: Longest frame that the store takes.
    frame_bytes_max: int

    def look(self) -> None:
        """Connect, and read which log this is; leads nothing.

        Raises:
            HomeFormatError: the tables, or a home that led, are of a newer version.
        """
        ...

    def lease(self) -> Lease:
        """Return the last lease."""
        ...

    def claim(self, *, seconds: float | None, force: bool = False) -> None:
        """Begin to lead under a new epoch, as soon as the lease of another broker has ended.

        Args:
            seconds: longest wait beyond a lease that is not renewed; None: do not wait.
            force: wait for no lease; the broker that leads is fenced.

        Raises:
            LogHeldError: another broker leads.
        """
        ...

    def reclaim(self) -> None:
        """Connect again and lead under a new epoch; appends under the old one cannot come late.

        Raises:
            LogFencedError: another broker has begun to lead.
        """
        ...

    def append(self, position: int, frame: bytes) -> None:
        """Store a frame at a position.

        Raises:
            LogFencedError: another broker has begun to lead, or the position is taken.
        """
        ...

    def begin(self, position: int, frame: bytes) -> None:
        """Send a frame; ``finish`` waits until it is stored."""
        ...

    def finish(self) -> None:
        """Wait until the frame that ``begin`` has sent is stored; raises what ``append`` raises."""
        ...

    def settle(self, position: int, frame: bytes) -> None:
        """Store a frame whose append failed or got no answer, unless the store has it.

        Raises:
            LogFencedError: another broker has begun to lead.
        """
        ...

    def abandon(self) -> None:
        """Drop the connection on which a frame is under way."""
        ...

    def last(self) -> Stored | None:
        """Return the last frame; None if the store is empty."""
        ...

    def headers(self, start: int) -> Iterator[Stored]:
        """Yield the frames that begin at or after a position, in order."""
        ...

    def frames(self, start: int) -> Iterator[tuple[Stored, bytes]]:
        """Yield the same frames with their bytes, which match their CRC."""
        ...

    def layouts(self) -> list[Layout]:
        """Return the layouts of the frames, in order; each holds until the next one starts."""
        ...

    def put_layout(self, layout: Layout) -> None:
        """Store the layout of the frames that are appended from its start on.

        Raises:
            LogFencedError: another broker has begun to lead.
        """
        ...

    def trim(self, before: int) -> None:
        """Delete the frames that end at or before a position; safe for all threads.

        It holds up neither ``renew`` nor a successor, however much goes. The last frame may stay.

        Raises:
            LogFencedError: another broker has begun to lead; nothing was deleted.
        """
        ...

    def renew(self) -> bool:
        """Renew the lease; return False if another broker has begun to lead.

        A connection that does not answer is given up after half a lease.
        """
        ...

    def file(self, name: str) -> bytes | None:
        """Return a file that leaders hand on; None if there is none."""
        ...

    def put_file(self, name: str, content: bytes) -> None:
        """Store a file for the next leader."""
        ...

    def close(self) -> None:
        """End the lease, if it is still this broker's, and the connections. Idempotent."""
        ...
