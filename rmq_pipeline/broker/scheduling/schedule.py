"""Messages that wait for their time: the open rows of SCHEDULE_TOPIC_XXXX.

They are held in a few runs. What arrives is a run of its own, and is merged with the run before it
once it has grown to be about as large: a row is moved a few times in its life, however many wait.
"""

from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rmq_pipeline.message import Int32s, Int64s

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]

#: Two runs are merged when the younger one has this part of the rows of the older one.
_MERGE_SHARE: Final = 4
#: Runs up to this size always are.
_SMALL_RUN: Final = 1024


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Rows of the schedule topic, one message each."""

    deliver_at: Int64s
    queue_id: Int32s
    queue_offset: Int64s
    #: Where the body lies in the commit log.
    position: Int64s
    row: Int32s
    target_topic_id: Int32s

    def __len__(self) -> int:
        return len(self.deliver_at)

    def take(self, rows: Rows | Mask | slice) -> "Scheduled":
        """These rows."""
        return Scheduled(*(getattr(self, field.name)[rows] for field in fields(self)))

    def keys(self) -> Int64s:
        """(queue_id, queue_offset) in one number."""
        return keys_of(self.queue_id, self.queue_offset)


def keys_of(queue_id: Int32s | int, queue_offset: Int64s) -> Int64s:
    """(queue_id, queue_offset) in one number."""
    keys: Int64s = (np.asarray(queue_id, dtype=np.int64) << np.int64(48)) | queue_offset
    return keys


def join(parts: list[Scheduled]) -> Scheduled:
    """All rows, in order."""

    def joined(columns: list[Any]) -> Any:
        return np.concatenate(columns)

    return Scheduled(*(joined([getattr(p, f.name) for p in parts]) for f in fields(Scheduled)))


EMPTY = Scheduled(
    deliver_at=np.zeros(0, np.int64),
    queue_id=np.zeros(0, np.int32),
    queue_offset=np.zeros(0, np.int64),
    position=np.zeros(0, np.int64),
    row=np.zeros(0, np.int32),
    target_topic_id=np.zeros(0, np.int32),
)


class _Run:
    """Rows that arrived one after the other, by (queue_id, queue_offset)."""

    __slots__ = ("_by_time", "_head", "gone", "keys", "open", "rows")

    def __init__(self, rows: Scheduled) -> None:
        keys = rows.keys()
        if np.any(keys[1:] < keys[:-1]):
            order = np.argsort(keys, kind="stable")
            rows, keys = rows.take(order), keys[order]
        self.rows = rows
        self.keys = keys
        self.gone = np.zeros(len(rows), np.bool_)
        #: How many are not gone.
        self.open = len(rows)
        #: The rows by time; of one time by queue and offset, so that a level keeps its order.
        self._by_time = np.argsort(rows.deliver_at, kind="stable").astype(np.int32)
        #: How many at the front of these are gone.
        self._head = 0

    def next_due_ms(self) -> int:
        """When the first open row is due; there must be one."""
        return int(self.rows.deliver_at[self._by_time[self._head]])

    def due(self, now_ms: int, limit: int) -> Rows:
        """The first ``limit`` open rows by time whose time has come."""
        found: list[Rows] = [np.zeros(0, np.intp)]
        start, left = self._head, limit
        while left > 0 and start < len(self._by_time):
            some = self._by_time[start : start + limit].astype(np.intp)
            come = some[self.rows.deliver_at[some] <= now_ms]
            still = come[~self.gone[come]][:left]
            found.append(still)
            left -= len(still)
            if len(come) < len(some):
                break
            start += len(some)
        return np.concatenate(found)

    def count_due(self, now_ms: int) -> int:
        """How many open rows have come to their time."""
        if self.next_due_ms() > now_ms:
            return 0
        return int(np.count_nonzero((self.rows.deliver_at <= now_ms) & ~self.gone))

    def find(self, keys: Int64s) -> tuple[Rows, Mask]:
        """Where these rows are, and which of them are here and open."""
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return at, (self.keys[at] == keys) & ~self.gone[at]

    def remove(self, keys: Int64s) -> None:
        """These rows wait no more; those that are not here are left alone."""
        at, found = self.find(keys)
        self.gone[at[found]] = True
        self.open -= int(np.count_nonzero(found))
        while self._head < len(self._by_time) and self.gone[self._by_time[self._head]]:
            ahead = self.gone[self._by_time[self._head : self._head + 65_536]]
            self._head += len(ahead) if ahead.all() else int(np.argmin(ahead))

    def left(self) -> Scheduled:
        """The open rows."""
        return self.rows.take(~self.gone) if self.open < len(self.rows) else self.rows


class Schedule:
    """Open rows by time, then by order of arrival; per level that is first in, first out."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._arrived: list[Scheduled] = []
        self._next = np.iinfo(np.int64).max

    def __len__(self) -> int:
        return sum(run.open for run in self._runs) + sum(len(rows) for rows in self._arrived)

    def add(self, rows: Scheduled) -> None:
        """Take in new rows."""
        if len(rows):
            self._arrived.append(rows)
            self._next = min(self._next, int(rows.deliver_at.min()))

    def _settled(self) -> list[_Run]:
        """The runs, with what has arrived."""
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            self._next = np.iinfo(np.int64).max
            self._runs.append(_Run(join(arrived) if len(arrived) > 1 else arrived[0]))
            while len(self._runs) > 1 and _alike(*self._runs[-2:]):
                younger, older = self._runs.pop(), self._runs.pop()
                self._runs.append(_Run(join([older.left(), younger.left()])))
        return self._runs

    def next_due_ms(self) -> int | None:
        """When the next row is due."""
        moments = [run.next_due_ms() for run in self._runs]
        if self._arrived:
            moments.append(self._next)
        return min(moments, default=None)

    def due(self, now_ms: int, limit: int) -> Scheduled:
        """Up to ``limit`` rows whose time has come, the earliest first."""
        next_due = self.next_due_ms()
        if next_due is None or next_due > now_ms or limit <= 0:
            return EMPTY
        parts = [run.rows.take(run.due(now_ms, limit)) for run in self._settled()]
        if len(parts) == 1:
            return parts[0]
        rows = join(parts)
        order = np.argsort(rows.deliver_at, kind="stable")  # an older run has what came earlier
        return rows.take(order[:limit])

    def count_due(self, now_ms: int) -> int:
        """How many rows have come to their time."""
        next_due = self.next_due_ms()
        if next_due is None or next_due > now_ms:
            return 0
        return sum(run.count_due(now_ms) for run in self._settled())

    def open(self, keys: Int64s) -> Mask:
        """Which of these rows still wait."""
        still = np.zeros(len(keys), np.bool_)
        for run in self._settled():
            still |= run.find(keys)[1]
        return still

    def find(self, keys: Int64s) -> tuple[Scheduled, Mask]:
        """Those of these rows that still wait, in their order, and which they are."""
        still = np.zeros(len(keys), np.bool_)
        parts, order = [EMPTY], [np.zeros(0, np.intp)]
        for run in self._settled():
            at, found = run.find(keys)
            still |= found
            parts.append(run.rows.take(at[found]))
            order.append(np.flatnonzero(found))
        return join(parts).take(np.argsort(np.concatenate(order))), still

    def remove(self, keys: Int64s) -> None:
        """Take out rows that were delivered, dropped or called back."""
        for run in self._settled():
            run.remove(keys)
        # What is gone is given back once it is most of a run.
        self._runs = [
            _Run(run.left()) if run.open * 2 < len(run.rows) else run
            for run in self._runs
            if run.open
        ]

    def first_offset(self, queue_id: int) -> int | None:
        """Where the first open row of a queue lies."""
        firsts = []
        for run in self._settled():
            mine = (run.rows.queue_id == queue_id) & ~run.gone
            if mine.any():
                firsts.append(int(run.rows.queue_offset[mine].min()))
        return min(firsts, default=None)

    def waiting_for(self, topic_id: int) -> int:
        """How many open rows are for this topic."""
        return sum(
            int(np.count_nonzero((run.rows.target_topic_id == topic_id) & ~run.gone))
            for run in self._settled()
        )


def _alike(older: _Run, younger: _Run) -> bool:
    small = older.open + younger.open <= _SMALL_RUN
    return small or younger.open * _MERGE_SHARE >= older.open
