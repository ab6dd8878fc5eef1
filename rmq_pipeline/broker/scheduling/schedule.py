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
    """Rows that arrived one after the other, by (queue_id, queue_offset).

    Args:
        rows: of the run.
        due_at: when each is due; None: when it is to be delivered.
    """

    __slots__ = ("_by_time", "_head", "due_at", "gone", "keys", "open", "rows")

    def __init__(self, rows: Scheduled, due_at: Int64s | None = None) -> None:
        keys = rows.keys()
        due_at = rows.deliver_at if due_at is None else due_at
        if np.any(keys[1:] < keys[:-1]):
            order = np.argsort(keys, kind="stable")
            rows, keys, due_at = rows.take(order), keys[order], due_at[order]
        self.rows = rows
        self.due_at = due_at
        self.keys = keys
        self.gone = np.zeros(len(rows), np.bool_)
        #: How many are not gone.
        self.open = len(rows)
        #: The rows by time; of one time by queue and offset, so that a level keeps its order.
        self._by_time = np.argsort(due_at, kind="stable").astype(np.int32)
        #: How many at the front of these are gone.
        self._head = 0

    def next_due_ms(self) -> int:
        """When the first open row is due; there must be one."""
        return int(self.due_at[self._by_time[self._head]])

    def due(self, now_ms: int, limit: int) -> Rows:
        """The first ``limit`` open rows by time whose time has come."""
        found: list[Rows] = [np.zeros(0, np.intp)]
        start, left = self._head, limit
        while left > 0 and start < len(self._by_time):
            some = self._by_time[start : start + limit].astype(np.intp)
            come = some[self.due_at[some] <= now_ms]
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
        return int(np.count_nonzero((self.due_at <= now_ms) & ~self.gone))

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

    def shrunk(self) -> "_Run":
        """The same without what is gone, once that is most of it."""
        if self.open * 2 >= len(self.rows):
            return self
        return _Run(self.left(), self.due_at[~self.gone])


class Schedule:
    """Open rows by time, then by order of arrival; per level that is first in, first out."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        #: What was put off, a run at most: what was not tried alone, and what cannot be read.
        self._untried: list[_Run] = []
        self._unreadable: list[_Run] = []
        self._arrived: list[Scheduled] = []
        self._next = np.iinfo(np.int64).max

    def __len__(self) -> int:
        arrived = sum(len(rows) for rows in self._arrived)
        return sum(run.open for run in self._all_runs()) + arrived

    def add(self, rows: Scheduled) -> None:
        """Take in new rows."""
        if len(rows):
            self._arrived.append(rows)
            self._next = min(self._next, int(rows.deliver_at.min()))

    def _all_runs(self) -> list[_Run]:
        return [*self._unreadable, *self._untried, *self._runs]

    def _settled(self) -> list[_Run]:
        """All runs, with what has arrived."""
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            self._next = np.iinfo(np.int64).max
            self._runs.append(_Run(join(arrived) if len(arrived) > 1 else arrived[0]))
            while len(self._runs) > 1 and _alike(*self._runs[-2:]):
                younger, older = self._runs.pop(), self._runs.pop()
                self._runs.append(_Run(join([older.left(), younger.left()])))
        return self._all_runs()

    def next_due_ms(self) -> int | None:
        """When the next row is due."""
        moments = [run.next_due_ms() for run in self._all_runs()]
        if self._arrived:
            moments.append(self._next)
        return min(moments, default=None)

    def due(self, now_ms: int, limit: int) -> Scheduled:
        """Up to ``limit`` rows whose time has come, the earliest first.

        Those that could not be read come alone, when nothing else is due: nobody waits for them.
        """
        next_due = self.next_due_ms()
        if next_due is None or next_due > now_ms or limit <= 0:
            return EMPTY
        self._settled()
        rows = _due(self._runs, now_ms, limit=limit)
        if self._untried:
            untried = _due(self._untried, now_ms, limit=limit)
            rows = _in_order(join([rows, untried])).take(slice(limit))
        if not len(rows):
            rows = _in_order(_due(self._unreadable, now_ms, limit=limit))
        return rows

    def put_off(self, keys: Int64s, *, until_ms: Int64s, alone: Mask) -> int:
        """Have these rows be due then, each, and not before; how many never were put off.

        They wait as they did: delivered, dropped or called back at any time. Only in memory, so
        that each start tries all of them.

        Args:
            keys: of the rows.
            until_ms: of each.
            alone: which could not be read alone; one of these stays one of these.
        """
        rows, still = self.find(keys)
        until_ms, alone = until_ms[still], alone[still]
        new = np.ones(len(rows), np.bool_)
        for run in self._untried:
            new &= ~run.find(rows.keys())[1]
        for run in self._unreadable:
            before = run.find(rows.keys())[1]
            new, alone = new & ~before, alone | before
        self.remove(rows.keys())
        self._untried = _joined(self._untried, rows.take(~alone), due_at=until_ms[~alone])
        self._unreadable = _joined(self._unreadable, rows.take(alone), due_at=until_ms[alone])
        return int(np.count_nonzero(new))

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
        self._runs = [run.shrunk() for run in self._runs if run.open]
        self._untried = [run.shrunk() for run in self._untried if run.open]
        self._unreadable = [run.shrunk() for run in self._unreadable if run.open]

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


def _due(runs: list[_Run], now_ms: int, *, limit: int) -> Scheduled:
    """Up to ``limit`` rows of these runs, the earliest first."""
    parts = [run.rows.take(run.due(now_ms, limit)) for run in runs]
    if len(parts) == 1:
        return parts[0]
    rows = join([EMPTY, *parts])
    order = np.argsort(rows.deliver_at, kind="stable")  # an older run has what came earlier
    return rows.take(order[:limit])


def _in_order(rows: Scheduled) -> Scheduled:
    """By time, whenever they came, and whenever they are due again."""
    return rows.take(np.lexsort((rows.keys(), rows.deliver_at)))


def _joined(runs: list[_Run], rows: Scheduled, *, due_at: Int64s) -> list[_Run]:
    """One run of the open rows of these and of those rows; none of no rows."""
    parts = [rows, *(run.left() for run in runs)]
    moments = [due_at, *(run.due_at[~run.gone] for run in runs)]
    joined = join(parts)
    return [_Run(joined, np.concatenate(moments))] if len(joined) else []


def _alike(older: _Run, younger: _Run) -> bool:
    small = older.open + younger.open <= _SMALL_RUN
    return small or younger.open * _MERGE_SHARE >= older.open
