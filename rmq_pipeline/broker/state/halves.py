"""Open half messages: rows of the half topic whose transactions have not ended."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.events import Kind

#: Row of an open half message. ``checks``: number so far; ``due_ms``: next check; ``producer``: a
#: code.
HALF: Final = np.dtype(
    [
        ("queue_offset", np.int64),
        ("message_id_hash", np.int64),
        ("due_ms", np.int64),
        ("immunity_ms", np.int64),
        ("position", np.int64),
        ("row", np.int32),
        ("target_topic_id", np.int32),
        ("producer", np.int32),
        ("checks", np.int32),
        ("open", np.bool_),
    ]
)
#: Array of HALF rows.
Rows = npt.NDArray[np.void]
_FAR: Final = np.iinfo(np.int64).max
_FIRST_ROOM: Final = 64


class Halves:
    """Rows of HALF by queue_offset, the order of their arrival; ended rows are only marked."""

    def __init__(self) -> None:
        self._room: Rows = np.zeros(_FIRST_ROOM, HALF)
        self._n = 0
        self._open = 0
        #: No open row is due before this time.
        self._next = _FAR
        #: Offsets of open half messages whose check was delayed.
        self._put_off: set[int] = set()
        self._producers: list[str] = []
        self._codes: dict[str, int] = {}

    def __len__(self) -> int:
        return self._open

    @property
    def _rows(self) -> Rows:
        return self._room[: self._n]

    def add(
        self, queue_offset: Int64s, *, position: Int64s | int, row: Int32s, target: Int32s
    ) -> None:
        """Add stored half messages; the HALF events of the same frame fill in the other fields."""
        n = len(queue_offset)
        if self._n + n > len(self._room):
            kept = self._rows[self._rows["open"]]
            self._room = np.zeros(max(_FIRST_ROOM, 2 * (len(kept) + n)), HALF)
            self._room[: len(kept)] = kept
            self._n = len(kept)
        new = self._room[self._n : self._n + n]
        new["queue_offset"], new["position"], new["row"] = queue_offset, position, row
        new["target_topic_id"], new["due_ms"], new["open"] = target, _FAR, True
        self._n += n
        self._open += n

    def apply(self, events: EventRows) -> None:
        """Apply HALF events, or the ends of half messages."""
        at = self._find(events.queue_offset)
        assert np.all(at >= 0), "an event of a half message that is not open"
        rows = self._rows
        if events.kind != Kind.HALF:
            rows["open"][at] = False
            self._open -= len(at)
            if self._put_off:
                self._put_off.difference_update(events.queue_offset.tolist())
            if not self._open:
                self._n, self._next = 0, _FAR
                self._producers, self._codes = [], {}
            return
        due = events.column("visible_at_ms", np.int64)
        rows["due_ms"][at] = due
        rows["checks"][at] = events.attempt
        rows["immunity_ms"][at] = events.delivery
        rows["message_id_hash"][at] = events.message_group_hash
        rows["producer"][at] = self.code(events.producer_group)
        self._next = min(self._next, int(due.min()))

    def not_put_off(self, queue_offset: Int64s) -> int:
        """Return how many of these half messages are open and were not delayed before."""
        still = self._find(queue_offset) >= 0
        return len(set(queue_offset[still].tolist()).difference(self._put_off))

    def put_off(self, queue_offset: Int64s, *, until_ms: int) -> None:
        """Delay open half messages to ``until_ms``.

        The delay is kept in memory only, so each start retries all of them.
        """
        at = self._find(queue_offset)
        at = at[at >= 0]
        self._rows["due_ms"][at] = until_ms
        self._put_off.update(self._rows["queue_offset"][at].tolist())

    def code(self, producer_group: str) -> int:
        """Return the code of a producer group."""
        found = self._codes.setdefault(producer_group, len(self._producers))
        if found == len(self._producers):
            self._producers.append(producer_group)
        return found

    def producer(self, code: int) -> str:
        """Return the producer group of a code."""
        return self._producers[code]

    def _find(self, queue_offset: Int64s) -> npt.NDArray[np.intp]:
        """Return the row of each open half message; -1 for none."""
        if not self._n:
            return np.full(len(queue_offset), -1, dtype=np.intp)
        rows = self._rows
        at = np.minimum(np.searchsorted(rows["queue_offset"], queue_offset), self._n - 1)
        at[(rows["queue_offset"][at] != queue_offset) | ~rows["open"][at]] = -1
        return at

    def find(self, queue_offset: Int64s, message_id_hash: Int64s) -> tuple[Rows, Any]:
        """Return the open ones of these half messages in this order, and their mask."""
        at = self._find(queue_offset)
        still = at >= 0
        still[still] = self._rows["message_id_hash"][at[still]] == message_id_hash[still]
        return self._rows[at[still]], still

    def first_offset(self) -> int | None:
        """Return the offset of the first open half message."""
        if not self._open:
            return None
        rows = self._rows
        return int(rows["queue_offset"][np.argmax(rows["open"])])

    def next_due_ms(self) -> int | None:
        """Return when the next check is due."""
        if not self._open:
            return None
        rows = self._rows
        return int(rows["due_ms"].min(where=rows["open"], initial=_FAR))

    def due(self, now_ms: int, limit: int) -> Rows:
        """Return up to ``limit`` half messages whose check is due, the earliest first."""
        if not self._open or self._next > now_ms or limit <= 0:
            return self._room[:0]
        rows = self._rows
        due_ms = np.where(rows["open"], rows["due_ms"], _FAR)
        found = np.flatnonzero(due_ms <= now_ms)
        if not len(found):
            self._next = int(due_ms.min())
            return self._room[:0]
        order = np.argsort(due_ms[found], kind="stable")
        return rows[found[order[:limit]]]

    def count_due(self, now_ms: int) -> int:
        """Return how many checks are due."""
        return len(self.due(now_ms, self._open))

    def waiting_for(self, topic_id: int) -> int:
        """Return how many open half messages belong to this topic."""
        rows = self._rows
        return int(np.count_nonzero(rows["open"] & (rows["target_topic_id"] == topic_id)))
