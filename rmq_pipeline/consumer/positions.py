"""Position of a reader in a message queue, with the messages fetched ahead."""

from collections import deque
from dataclasses import dataclass, field

import pyarrow as pa

from rmq_pipeline.consumer.flow_control import Thresholds
from rmq_pipeline.consumer.kept_offsets import Place
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.subscription import Subscription


@dataclass(slots=True)
class Position:
    """Queue that is read by offset. ``done`` <= ``at`` <= ``fetch_at``, except after a seek."""

    queue: MessageQueue
    subscription: Subscription
    #: Last known committed offset.
    known: Place
    #: Next offset to fetch, next offset to return, and first offset that is not processed.
    fetch_at: int = field(init=False)
    at: int = field(init=False)
    done: int = field(init=False)
    is_paused: bool = False
    #: The queue is moving to another member; polls return no more of it.
    is_dropping: bool = False
    #: The running fetch does not know the current fetch offset.
    is_moved: bool = True
    #: Fetched tables, each with the offset that follows it.
    _chunks: deque[tuple[pa.Table, int]] = field(default_factory=deque)
    _rows: int = 0
    _bytes: int = 0

    def __post_init__(self) -> None:
        self.fetch_at = self.at = self.done = self.known.offset

    @property
    def waiting(self) -> int:
        """Number of fetched messages that no poll has returned."""
        return self._rows

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the fetched messages that no poll has returned."""
        return self._bytes

    @property
    def is_left(self) -> bool:
        """True if the queue is moving to another member and no returned message is unprocessed."""
        return self.is_dropping and self.done == self.at

    @property
    def is_committed(self) -> bool:
        """True if all returned messages are processed and committed."""
        return self.done == self.at == self.known.offset

    def has_room(self, thresholds: Thresholds) -> bool:
        """Return True if more messages may be fetched."""
        return (
            self._rows < thresholds.messages
            and self._bytes < thresholds.bytes
            and self.fetch_at - self.at < thresholds.span
        )

    def add(self, rows: pa.Table, *, start: int, stop: int) -> bool:
        """Add the messages of [start, stop); return False if the position has moved meanwhile."""
        if start != self.fetch_at or self.is_dropping:
            return False
        self.fetch_at = stop
        self._chunks.append((rows, stop))
        self._rows += rows.num_rows
        self._bytes += rows.nbytes
        self._pass_empty()
        return True

    def take(self, limit: int) -> list[pa.Table]:
        """Remove and return up to ``limit`` messages, in order."""
        taken: list[pa.Table] = []
        while limit > 0 and self._chunks:
            rows, stop = self._chunks.popleft()
            self._rows -= rows.num_rows
            self._bytes -= rows.nbytes
            if rows.num_rows > limit:
                rest = rows.slice(limit)
                self._chunks.appendleft((rest, stop))
                self._rows += rest.num_rows
                self._bytes += rest.nbytes
                rows, stop = rows.slice(0, limit), rest["queue_offset"][0].as_py()
            taken.append(rows)
            limit -= rows.num_rows
            self.at = stop
        self._pass_empty()
        return taken

    def settle(self) -> None:
        """Mark all returned messages as processed."""
        self.done = self.at

    def seek(self, offset: int) -> None:
        """Move to an offset; the next commit commits it."""
        self.clear()
        self.fetch_at = self.at = self.done = offset
        self.is_moved = True

    def give_back(self, offset: int) -> None:
        """Return messages from an offset on again; processed messages stay processed."""
        self.at = offset
        self.clear()
        self.is_moved = True

    def clear(self) -> None:
        """Drop the messages fetched ahead."""
        self._chunks.clear()
        self._rows = self._bytes = 0
        self.fetch_at = self.at

    def _pass_empty(self) -> None:
        """Skip ranges in which the filter selected no message."""
        while self._chunks and not self._chunks[0][0].num_rows:
            settled = self.done == self.at
            self.at = self._chunks.popleft()[1]
            if settled:
                self.done = self.at
