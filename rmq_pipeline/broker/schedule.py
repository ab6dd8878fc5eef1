"""Messages that wait for their time: the open rows of SCHEDULE_TOPIC_XXXX, and their delivery."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from rmq_pipeline.message import Int32s, Int64s


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

    def take(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_] | slice) -> "Scheduled":
        """These rows."""
        return Scheduled(*(getattr(self, field.name)[rows] for field in fields(self)))

    def keys(self) -> Int64s:
        """(queue_id, queue_offset) in one number."""
        keys: Int64s = (self.queue_id.astype(np.int64) << 48) | self.queue_offset
        return keys


def _joined(columns: list[Any]) -> Any:
    return np.concatenate(columns)


def join(parts: list[Scheduled]) -> Scheduled:
    """All rows, in order."""
    return Scheduled(*(_joined([getattr(p, f.name) for p in parts]) for f in fields(Scheduled)))


EMPTY = Scheduled(
    deliver_at=np.zeros(0, np.int64),
    queue_id=np.zeros(0, np.int32),
    queue_offset=np.zeros(0, np.int64),
    position=np.zeros(0, np.int64),
    row=np.zeros(0, np.int32),
    target_topic_id=np.zeros(0, np.int32),
)


class Schedule:
    """Open rows by time, then by order of arrival; per level that is first in, first out."""

    def __init__(self) -> None:
        self._rows = EMPTY
        self._gone = np.zeros(0, np.bool_)
        self._head = 0
        self._arrived: list[Scheduled] = []
        self._next = np.iinfo(np.int64).max

    def __len__(self) -> int:
        return (
            len(self._rows)
            - self._head
            - int(np.count_nonzero(self._gone[self._head :]))
            + sum(len(rows) for rows in self._arrived)
        )

    def add(self, rows: Scheduled) -> None:
        """Take in new rows."""
        if len(rows):
            self._arrived.append(rows)
            self._next = min(self._next, int(rows.deliver_at.min()))

    def _settle(self) -> None:
        """Merge what arrived; a stable sort keeps the order of arrival among equal times."""
        if not self._arrived:
            return
        keep = np.flatnonzero(~self._gone[self._head :]) + self._head
        rows = join([self._rows.take(keep), *self._arrived])
        self._rows = rows.take(np.argsort(rows.deliver_at, kind="stable"))
        self._gone = np.zeros(len(rows), np.bool_)
        self._head = 0
        self._arrived = []
        self._next = np.iinfo(np.int64).max

    def next_due_ms(self) -> int | None:
        """When the next row is due."""
        moments = [self._next] if self._arrived else []
        if self._head < len(self._rows):
            moments.append(int(self._rows.deliver_at[self._head]))
        return min(moments, default=None)

    def due(self, now_ms: int, limit: int) -> Scheduled:
        """Up to ``limit`` rows whose time has come, the earliest first."""
        next_due = self.next_due_ms()
        if next_due is None or next_due > now_ms:
            return EMPTY
        self._settle()
        stop = int(np.searchsorted(self._rows.deliver_at, now_ms, side="right"))
        rows = np.flatnonzero(~self._gone[self._head : stop])[:limit] + self._head
        return self._rows.take(rows)

    def overdue(self, before_ms: int) -> int:
        """How many rows were due before this moment."""
        return len(self.due(before_ms, len(self)))

    def _find(self, rows_key: Int64s, deliver_at: Int64s) -> tuple[int, npt.NDArray[np.bool_]]:
        self._settle()
        start = max(self._head, int(np.searchsorted(self._rows.deliver_at, deliver_at.min())))
        stop = int(np.searchsorted(self._rows.deliver_at, deliver_at.max(), side="right"))
        part = self._rows.take(slice(start, max(start, stop)))
        return start, np.isin(part.keys(), rows_key)

    def open(self, rows: Scheduled) -> npt.NDArray[np.bool_]:
        """Which of these rows still wait."""
        start, found = self._find(rows.keys(), rows.deliver_at)
        at = np.flatnonzero(found) + start
        at = at[~self._gone[at]]
        return np.isin(rows.keys(), self._rows.take(at).keys())

    def remove(self, queue_id: int, queue_offset: Int64s, *, deliver_at: Int64s) -> None:
        """Take out rows that were delivered or dropped."""
        keys = (np.int64(queue_id) << np.int64(48)) | queue_offset
        start, found = self._find(keys, deliver_at)
        self._gone[np.flatnonzero(found) + start] = True
        while self._head < len(self._gone) and self._gone[self._head]:
            ahead = self._gone[self._head : self._head + 65_536]
            self._head += int(np.argmin(ahead)) if not ahead.all() else len(ahead)

    def waiting_for(self, topic_id: int) -> int:
        """How many open rows are for this topic."""
        self._settle()
        rows = self._rows.target_topic_id[self._head :] == topic_id
        return int(np.count_nonzero(rows & ~self._gone[self._head :]))
