"""Half messages that nobody has ended yet: the open rows of the half topic."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.event_rows import EventRows
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.events import Kind

#: An open half message. ``checks`` so far; ``due_ms`` of the next one; ``producer`` is a code.
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
#: Rows of HALF.
Rows = npt.NDArray[np.void]
_FAR: Final = np.iinfo(np.int64).max
_FIRST_ROOM: Final = 64


class Halves:
    """Rows of HALF by queue_offset, which is the order they come in; those that go are marked."""

    def __init__(self) -> None:
        self._room: Rows = np.zeros(_FIRST_ROOM, HALF)
        self._n = 0
        self._open = 0
        #: No open row is due before this.
        self._next = _FAR
        #: Offsets of open ones that were put off.
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
        """Half messages were stored; the HALF events of the same frame say the rest."""
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
        """Change the rows as HALF or an end of half messages says."""
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
        rows["producer"][at] = self.code(events.client_id or "")
        self._next = min(self._next, int(due.min()))

    def put_off(self, queue_offset: Int64s, *, until_ms: int) -> int:
        """Have those that are open be due then; how many never were put off.

        Only in memory, so that each start tries all of them.
        """
        at = self._find(queue_offset)
        at = at[at >= 0]
        self._rows["due_ms"][at] = until_ms
        new = set(self._rows["queue_offset"][at].tolist()).difference(self._put_off)
        self._put_off.update(new)
        return len(new)

    def code(self, producer_group: str) -> int:
        """The number that stands for a producer group."""
        found = self._codes.setdefault(producer_group, len(self._producers))
        if found == len(self._producers):
            self._producers.append(producer_group)
        return found

    def producer(self, code: int) -> str:
        """The producer group behind a number."""
        return self._producers[code]

    def _find(self, queue_offset: Int64s) -> npt.NDArray[np.intp]:
        """Where each open half message is; -1 for none."""
        if not self._n:
            return np.full(len(queue_offset), -1, dtype=np.intp)
        rows = self._rows
        at = np.minimum(np.searchsorted(rows["queue_offset"], queue_offset), self._n - 1)
        at[(rows["queue_offset"][at] != queue_offset) | ~rows["open"][at]] = -1
        return at

    def find(self, queue_offset: Int64s, message_id_hash: Int64s) -> tuple[Rows, Any]:
        """The open ones of these half messages, in this order, and a mask of which are open."""
        at = self._find(queue_offset)
        still = at >= 0
        still[still] = self._rows["message_id_hash"][at[still]] == message_id_hash[still]
        return self._rows[at[still]], still

    def first_offset(self) -> int | None:
        """Where the first open half message lies."""
        if not self._open:
            return None
        rows = self._rows
        return int(rows["queue_offset"][np.argmax(rows["open"])])

    def next_due_ms(self) -> int | None:
        """When the next check is due."""
        if not self._open:
            return None
        rows = self._rows
        return int(rows["due_ms"].min(where=rows["open"], initial=_FAR))

    def due(self, now_ms: int, limit: int) -> Rows:
        """Up to ``limit`` half messages whose check is due, the earliest first."""
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
        """How many checks are due."""
        return len(self.due(now_ms, self._open))

    def waiting_for(self, topic_id: int) -> int:
        """How many open half messages are for this topic."""
        rows = self._rows
        return int(np.count_nonzero(rows["open"] & (rows["target_topic_id"] == topic_id)))
