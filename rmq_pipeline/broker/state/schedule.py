"""Messages that wait for their time: the open rows of SCHEDULE_TOPIC_XXXX.

They are held in a few runs. New rows become a run, which is merged with the run before it once it
has about the same size. So a row is copied a few times only, however many rows wait.
"""

from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.topic import TIMER_QUEUE

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]

#: Two runs are merged if the younger has at least 1/4 of the older one's rows.
_MERGE_SHARE: Final = 4
#: Two runs with no more open rows than this together are always merged.
_SMALL_RUN: Final = 1024


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Rows of the schedule topic, one message each."""

    deliver_at: Int64s
    queue_id: Int32s
    queue_offset: Int64s
    #: Place of the body in the commit log.
    position: Int64s
    row: Int32s
    target_topic_id: Int32s

    def __len__(self) -> int:
        return len(self.deliver_at)

    def take(self, rows: Rows | Mask | slice) -> "Scheduled":
        """Return the given rows."""
        return Scheduled(*(getattr(self, field.name)[rows] for field in fields(self)))

    def keys(self) -> Int64s:
        """Return (queue_id, queue_offset) of each row as one number."""
        return keys_of(self.queue_id, self.queue_offset)


def keys_of(queue_id: Int32s | int, queue_offset: Int64s) -> Int64s:
    """Return (queue_id, queue_offset) as one number."""
    keys: Int64s = (np.asarray(queue_id, dtype=np.int64) << np.int64(48)) | queue_offset
    return keys


def join(parts: list[Scheduled]) -> Scheduled:
    """Return all rows, in order."""

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
    """Rows that arrived one after the other, sorted by (queue_id, queue_offset).

    Args:
        rows: rows of the run.
        due_at: time at which each row is due; None: its deliver_at.
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
        #: Number of open rows.
        self.open = len(rows)
        #: Row indices by time; ties by queue and offset, so that a level keeps its order.
        self._by_time = np.argsort(due_at, kind="stable").astype(np.int32)
        #: Number of rows at the front of ``_by_time`` that are gone.
        self._head = 0

    def next_due_ms(self) -> int:
        """Return when the first open row is due; the run must have one."""
        return int(self.due_at[self._by_time[self._head]])

    def due(self, now_ms: int, limit: int) -> Rows:
        """Return up to ``limit`` open rows that are due, by time."""
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
        """Return how many open rows are due."""
        if self.next_due_ms() > now_ms:
            return 0
        return int(np.count_nonzero((self.due_at <= now_ms) & ~self.gone))

    def find(self, keys: Int64s) -> tuple[Rows, Mask]:
        """Return the index of each key, and the mask of those that are here and open."""
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return at, (self.keys[at] == keys) & ~self.gone[at]

    def remove(self, keys: Int64s) -> None:
        """Mark rows as gone; ignore keys that are not here."""
        at, found = self.find(keys)
        self.gone[at[found]] = True
        self.open -= int(np.count_nonzero(found))
        while self._head < len(self._by_time) and self.gone[self._by_time[self._head]]:
            ahead = self.gone[self._by_time[self._head : self._head + 65_536]]
            self._head += len(ahead) if ahead.all() else int(np.argmin(ahead))

    def left(self) -> Scheduled:
        """Return the open rows."""
        return self.rows.take(~self.gone) if self.open < len(self.rows) else self.rows

    def shrunk(self) -> "_Run":
        """Return the run without gone rows if these are the majority, or else itself."""
        if self.open * 2 >= len(self.rows):
            return self
        return _Run(self.left(), self.due_at[~self.gone])


class Schedule:
    """Open rows by time, then by arrival: each level is first in, first out.

    A level is an interval of the broker's time. A time given by a sender is one of the wall clock.
    While the broker's time is ``ahead_ms`` ahead of the wall clock, rows with a given time are due
    that much later.
    """

    def __init__(self) -> None:
        #: Runs of delay levels, and runs of given times.
        self._runs: list[_Run] = []
        self._timed: list[_Run] = []
        #: Delayed rows, at most one run each: rows that were not tried alone, and unreadable rows.
        self._untried: list[_Run] = []
        self._unreadable: list[_Run] = []
        self._arrived: list[Scheduled] = []
        self._next = np.iinfo(np.int64).max

    def __len__(self) -> int:
        arrived = sum(len(rows) for rows in self._arrived)
        return sum(run.open for run in self._all_runs()) + arrived

    def add(self, rows: Scheduled) -> None:
        """Add new rows."""
        if len(rows):
            self._arrived.append(rows)
            self._next = min(self._next, int(rows.deliver_at.min()))

    def _all_runs(self) -> list[_Run]:
        return [*self._unreadable, *self._untried, *self._runs, *self._timed]

    def _settled(self) -> list[_Run]:
        """Add the new rows to the runs, and return all runs."""
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            self._next = np.iinfo(np.int64).max
            rows = join(arrived) if len(arrived) > 1 else arrived[0]
            timed = rows.queue_id == TIMER_QUEUE
            _append(self._runs, rows.take(~timed) if timed.any() else rows)
            _append(self._timed, rows.take(timed))
        return self._all_runs()

    def next_due_ms(self, *, ahead_ms: int = 0) -> int | None:
        """Return when the next row is due; possibly too early for rows that were just added."""
        runs = [*self._unreadable, *self._untried, *self._runs]
        moments = [run.next_due_ms() for run in runs]
        moments += [run.next_due_ms() + ahead_ms for run in self._timed]
        if self._arrived:
            moments.append(self._next)
        return min(moments, default=None)

    def due(self, now_ms: int, limit: int, *, ahead_ms: int = 0) -> Scheduled:
        """Return up to ``limit`` rows that are due, the earliest first.

        Unreadable rows are returned only if nothing else is due, so that they delay no other row.
        """
        next_due = self.next_due_ms(ahead_ms=ahead_ms)
        if next_due is None or next_due > now_ms or limit <= 0:
            return EMPTY
        self._settled()
        rows = _due(self._runs, now_ms, limit=limit)
        if self._timed:
            timed = _due(self._timed, now_ms - ahead_ms, limit=limit)
            rows = _first(join([rows, timed]), limit) if len(rows) else timed
        if self._untried:
            untried = _due(self._untried, now_ms, limit=limit)
            rows = _in_order(join([rows, untried])).take(slice(limit))
        if not len(rows):
            rows = _in_order(_due(self._unreadable, now_ms, limit=limit))
        return rows

    def not_put_off(self, keys: Int64s) -> int:
        """Return how many of these rows wait and were not delayed before."""
        new = self.open(keys)
        for run in (*self._untried, *self._unreadable):
            new &= ~run.find(keys)[1]
        return int(np.count_nonzero(new))

    def put_off(self, keys: Int64s, *, until_ms: Int64s, alone: Mask) -> None:
        """Delay rows to ``until_ms``.

        Until then they can still be dropped or recalled. The delay is kept in memory only, so each
        start retries all of them.

        Args:
            keys: keys of the rows.
            until_ms: time of each row.
            alone: mask of the rows that failed when read alone; such a row stays marked.
        """
        rows, still = self.find(keys)
        until_ms, alone = until_ms[still], alone[still]
        for run in self._unreadable:
            alone = alone | run.find(rows.keys())[1]
        self.remove(rows.keys())
        self._untried = _joined(self._untried, rows.take(~alone), due_at=until_ms[~alone])
        self._unreadable = _joined(self._unreadable, rows.take(alone), due_at=until_ms[alone])

    def count_due(self, now_ms: int, *, ahead_ms: int = 0) -> int:
        """Return how many rows are due."""
        next_due = self.next_due_ms(ahead_ms=ahead_ms)
        if next_due is None or next_due > now_ms:
            return 0
        self._settled()
        runs = [*self._unreadable, *self._untried, *self._runs]
        timed = sum(run.count_due(now_ms - ahead_ms) for run in self._timed)
        return timed + sum(run.count_due(now_ms) for run in runs)

    def open(self, keys: Int64s) -> Mask:
        """Return the mask of the rows that still wait."""
        still = np.zeros(len(keys), np.bool_)
        for run in self._settled():
            still |= run.find(keys)[1]
        return still

    def find(self, keys: Int64s) -> tuple[Scheduled, Mask]:
        """Return the rows that still wait, in the order of the keys, and their mask."""
        still = np.zeros(len(keys), np.bool_)
        parts, order = [EMPTY], [np.zeros(0, np.intp)]
        for run in self._settled():
            at, found = run.find(keys)
            still |= found
            parts.append(run.rows.take(at[found]))
            order.append(np.flatnonzero(found))
        return join(parts).take(np.argsort(np.concatenate(order))), still

    def remove(self, keys: Int64s) -> None:
        """Remove rows that were delivered, dropped or recalled."""
        for run in self._settled():
            run.remove(keys)
        self._runs = [run.shrunk() for run in self._runs if run.open]
        self._timed = [run.shrunk() for run in self._timed if run.open]
        self._untried = [run.shrunk() for run in self._untried if run.open]
        self._unreadable = [run.shrunk() for run in self._unreadable if run.open]

    def first_offset(self, queue_id: int) -> int | None:
        """Return the offset of the first open row of a queue."""
        firsts = []
        for run in self._settled():
            mine = (run.rows.queue_id == queue_id) & ~run.gone
            if mine.any():
                firsts.append(int(run.rows.queue_offset[mine].min()))
        return min(firsts, default=None)

    def waiting_for(self, topic_id: int) -> int:
        """Return how many open rows are for this topic."""
        return sum(
            int(np.count_nonzero((run.rows.target_topic_id == topic_id) & ~run.gone))
            for run in self._settled()
        )


def _due(runs: list[_Run], now_ms: int, *, limit: int) -> Scheduled:
    """Return up to ``limit`` due rows of these runs, the earliest first."""
    parts = [run.rows.take(run.due(now_ms, limit)) for run in runs]
    if len(parts) == 1:
        return parts[0]
    return _first(join([EMPTY, *parts]), limit)


def _first(rows: Scheduled, limit: int) -> Scheduled:
    """Return up to ``limit`` rows, the earliest first."""
    order = np.argsort(rows.deliver_at, kind="stable")  # stable: an older run has the earlier rows
    return rows.take(order[:limit])


def _append(runs: list[_Run], rows: Scheduled) -> None:
    """Add a run of these rows; merge it with the earlier runs of similar size."""
    if not len(rows):
        return
    runs.append(_Run(rows))
    while len(runs) > 1 and _alike(*runs[-2:]):
        younger, older = runs.pop(), runs.pop()
        runs.append(_Run(join([older.left(), younger.left()])))


def _in_order(rows: Scheduled) -> Scheduled:
    """Sort by delivery time, whenever the rows arrived or are due again."""
    return rows.take(np.lexsort((rows.keys(), rows.deliver_at)))


def _joined(runs: list[_Run], rows: Scheduled, *, due_at: Int64s) -> list[_Run]:
    """Return one run of all open rows and the given rows; no run without rows."""
    parts = [rows, *(run.left() for run in runs)]
    moments = [due_at, *(run.due_at[~run.gone] for run in runs)]
    joined = join(parts)
    return [_Run(joined, np.concatenate(moments))] if len(joined) else []


def _alike(older: _Run, younger: _Run) -> bool:
    small = older.open + younger.open <= _SMALL_RUN
    return small or younger.open * _MERGE_SHARE >= older.open
