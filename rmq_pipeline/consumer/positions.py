"""How far a reader is in a message queue, and what it has fetched ahead of that."""

from collections import deque
from dataclasses import dataclass, field

import pyarrow as pa

from rmq_pipeline.consumer.flow_control import Thresholds
from rmq_pipeline.consumer.kept_offsets import Place
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.subscription import Subscription


@dataclass(slots=True)
class Position:
    """A queue that is read by offset. ``done`` <= ``at`` <= ``fetch_at``, but after a seek."""

    queue: MessageQueue
    subscription: Subscription
    #: What is kept as the committed offset, as far as is known here.
    known: Place
    #: The next offset to fetch, to give out, and the first that is not done with.
    fetch_at: int = field(init=False)
    at: int = field(init=False)
    done: int = field(init=False)
    is_paused: bool = False
    #: On its way to another member: nothing more of it is given out.
    is_dropping: bool = False
    #: To be fetched from another offset than the fetch under way knows of.
    is_moved: bool = True
    #: Tables that were fetched, each with the offset that follows it.
    _chunks: deque[tuple[pa.Table, int]] = field(default_factory=deque)
    _rows: int = 0
    _bytes: int = 0

    def __post_init__(self) -> None:
        self.fetch_at = self.at = self.done = self.known.offset

    @property
    def waiting(self) -> int:
        """Messages that were fetched and not given out."""
        return self._rows

    @property
    def waiting_bytes(self) -> int:
        """Of all that was fetched and not given out."""
        return self._bytes

    @property
    def is_left(self) -> bool:
        """Whether it is on its way to another member, and nothing of it is worked on here."""
        return self.is_dropping and self.done == self.at

    @property
    def is_committed(self) -> bool:
        """Whether all that was given out is done with, and committed."""
        return self.done == self.at == self.known.offset

    def has_room(self, thresholds: Thresholds) -> bool:
        """Whether more is to be fetched."""
        return (
            self._rows < thresholds.messages
            and self._bytes < thresholds.bytes
            and self.fetch_at - self.at < thresholds.span
        )

    def add(self, rows: pa.Table, *, start: int, stop: int) -> bool:
        """Fetched: the messages of [start, stop); not kept when it has moved meanwhile."""
        if start != self.fetch_at or self.is_dropping:
            return False
        self.fetch_at = stop
        self._chunks.append((rows, stop))
        self._rows += rows.num_rows
        self._bytes += rows.nbytes
        self._pass_empty()
        return True

    def take(self, limit: int) -> list[pa.Table]:
        """Give out up to ``limit`` messages, in order."""
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
        """All that was given out is done with."""
        self.done = self.at

    def seek(self, offset: int) -> None:
        """Go on from an offset, which is what the next commit says."""
        self.clear()
        self.fetch_at = self.at = self.done = offset
        self.is_moved = True

    def give_back(self, offset: int) -> None:
        """What was given out from an offset on comes again; what is done with stays so."""
        self.at = offset
        self.clear()
        self.is_moved = True

    def clear(self) -> None:
        """Forget what was fetched ahead."""
        self._chunks.clear()
        self._rows = self._bytes = 0
        self.fetch_at = self.at

    def _pass_empty(self) -> None:
        """Where a filter has wanted nothing, there is nothing to wait for."""
        while self._chunks and not self._chunks[0][0].num_rows:
            settled = self.done == self.at
            self.at = self._chunks.popleft()[1]
            if settled:
                self.done = self.at
