"""The unsettled deliveries of one consumer group on one queue, as columns sorted by offset."""

from typing import Any

import numpy as np
import numpy.typing as npt

from rmq_pipeline.message import Int32s, Int64s

Rows = npt.NDArray[np.intp]
Columns = dict[str, npt.NDArray[Any]]
FAR = np.iinfo(np.int64).max
#: ``delivery`` of a row that waits to be delivered again, and of one that is to be dead-lettered.
WAITING = 0
DOOMED = -1
#: And of one that failed for good and is parked, and of one that is held behind such a one.
PARKED = -2
HELD = -3
#: And of one that was acked while one before it is not, in order by queue.
AHEAD = -4


class LeaseTable:
    """Rows of messages that were delivered and are not settled.

    A row that goes is only marked (``alive`` false) until half of the table is dead, so a settle of
    few rows among many costs few rows' work.
    """

    _COLUMNS = ("offset", "attempt", "visible_at", "delivery", "epoch", "group", "alive")

    def __init__(self) -> None:
        self._n = 0
        self._dead = 0
        self._allocate(64)
        #: No alive row becomes visible before this; exact after ``scan``.
        self.next_visible = FAR

    def _allocate(self, capacity: int) -> None:
        self._offset = np.empty(capacity, np.int64)
        self._attempt = np.empty(capacity, np.int32)
        self._visible_at = np.empty(capacity, np.int64)
        self._delivery = np.empty(capacity, np.int64)
        self._epoch = np.empty(capacity, np.int64)
        self._group = np.empty(capacity, np.int64)
        self._alive = np.empty(capacity, np.bool_)

    def __len__(self) -> int:
        return self._n - self._dead

    @property
    def offset(self) -> Int64s:
        """Offsets of all rows, dead ones too, ascending."""
        return self._offset[: self._n]

    @property
    def attempt(self) -> Int32s:
        """Deliveries that count so far."""
        return self._attempt[: self._n]

    @property
    def visible_at(self) -> Int64s:
        """End of the lease, or when a waiting row may be delivered again."""
        return self._visible_at[: self._n]

    @property
    def delivery(self) -> Int64s:
        """The number in the receipt; when there is no lease WAITING, or what else it is."""
        return self._delivery[: self._n]

    @property
    def epoch(self) -> Int64s:
        """The window that holds the lease; 0: none. Below 0: the attempt that it was given to."""
        return self._epoch[: self._n]

    @property
    def group(self) -> Int64s:
        """message_group_hash."""
        return self._group[: self._n]

    @property
    def alive(self) -> npt.NDArray[np.bool_]:
        """Whether the row still is."""
        return self._alive[: self._n]

    def find(self, offsets: Int64s) -> Rows:
        """The row of each offset, -1 where there is none."""
        if self._n == 0:
            return np.full(len(offsets), -1, dtype=np.intp)
        rows = np.searchsorted(self.offset, offsets)
        rows[rows == self._n] = 0
        rows[(self._offset[rows] != offsets) | ~self._alive[rows]] = -1
        return rows

    def first_offset(self) -> int | None:
        """The smallest unsettled offset."""
        if len(self) == 0:
            return None
        return int(self._offset[int(np.argmax(self.alive))])

    def visible(self, now_ms: int) -> Rows:
        """Rows whose time has come, of those that have one; makes ``next_visible`` exact."""
        if now_ms < self.next_visible or len(self) == 0:
            return np.zeros(0, dtype=np.intp)
        open_rows = self.alive & (self.delivery >= WAITING)
        ready = open_rows & (self.visible_at <= now_ms)
        waiting = self.visible_at[open_rows & ~ready]
        found = np.flatnonzero(ready)
        later = int(waiting.min()) if len(waiting) else FAR
        self.next_visible = min(now_ms, later) if len(found) else later
        return found

    def next_after(self, now_ms: int) -> int | None:
        """When the next row that is not visible yet becomes so; None when there is none."""
        if len(self) == 0:
            return None
        later = self.visible_at[
            self.alive & (self.delivery >= WAITING) & (self.visible_at > now_ms)
        ]
        return int(later.min()) if len(later) else None

    def of_groups(self, groups: Int64s) -> Rows:
        """Alive rows of these message groups, in offset order."""
        if not len(groups):
            return np.zeros(0, dtype=np.intp)
        if len(groups) == 1:
            return np.flatnonzero(self.alive & (self.group == groups[0]))
        return np.flatnonzero(self.alive & np.isin(self.group, groups))

    def doomed(self) -> Rows:
        """Rows that are to be dead-lettered."""
        return np.flatnonzero(self.alive & (self.delivery == DOOMED))

    def parked(self) -> Rows:
        """Rows that are parked, or held behind such a one."""
        held = (self.delivery == PARKED) | (self.delivery == HELD)
        return np.flatnonzero(self.alive & held)

    def upsert(
        self,
        offsets: Int64s,
        *,
        attempt: Int32s,
        visible_at: Int64s,
        delivery: Int64s,
        epoch: Int64s,
        group: Int64s,
    ) -> Rows:
        """Set these rows; indices into the arguments of those that were not there before."""
        columns: Columns = {
            "_attempt": attempt,
            "_visible_at": visible_at,
            "_delivery": delivery,
            "_epoch": epoch,
            "_group": group,
        }
        open_rows = delivery >= WAITING
        if open_rows.any():
            self.next_visible = min(self.next_visible, int(visible_at[open_rows].min()))
        if self._n == 0 or offsets.min() > self._offset[self._n - 1]:
            order = np.arange(len(offsets))
            if len(offsets) > 1 and np.any(np.diff(offsets) <= 0):
                order = np.argsort(offsets, kind="stable")
            self._append(offsets[order], {name: values[order] for name, values in columns.items()})
            return np.arange(len(offsets))
        at = np.searchsorted(self.offset, offsets)
        known = (at < self._n) & (self._offset[np.minimum(at, self._n - 1)] == offsets)
        rows = at[known]
        revived = np.flatnonzero(known)[~self._alive[rows]]
        self._dead -= len(revived)
        self._alive[rows] = True
        for name, values in columns.items():
            getattr(self, name)[rows] = values[known]
        new = np.flatnonzero(~known)
        if len(new):
            self._merge(offsets[new], {name: values[new] for name, values in columns.items()})
        return np.concatenate([revived, new]) if len(revived) else new

    def _append(self, offsets: Int64s, columns: Columns) -> None:
        start, stop = self._n, self._n + len(offsets)
        if stop > len(self._offset):
            self._grow(stop)
        self._offset[start:stop] = offsets
        self._alive[start:stop] = True
        for name, values in columns.items():
            getattr(self, name)[start:stop] = values
        self._n = stop

    def _grow(self, needed: int) -> None:
        old = {name: getattr(self, f"_{name}")[: self._n] for name in self._COLUMNS}
        self._allocate(max(needed, 2 * self._n))
        for name, values in old.items():
            getattr(self, f"_{name}")[: self._n] = values

    def _merge(self, offsets: Int64s, columns: Columns) -> None:
        self._append(offsets, columns)
        order = np.argsort(self.offset, kind="stable")
        for name in self._COLUMNS:
            column = getattr(self, f"_{name}")
            column[: self._n] = column[order]

    def remove(self, rows: Rows) -> None:
        """Take these alive rows out."""
        self._alive[rows] = False
        self._dead += len(rows)
        self._shorten(rows)
        if self._dead == self._n:
            self._n = self._dead = 0
            self.next_visible = FAR
            if len(self._offset) > 65_536:
                self._allocate(64)
        elif self._dead > 64 and self._dead * 2 > self._n:
            keep = np.flatnonzero(self.alive)
            for name in self._COLUMNS:
                column = getattr(self, f"_{name}")
                column[: len(keep)] = column[keep]
            self._n, self._dead = len(keep), 0

    def _shorten(self, gone: Rows) -> None:
        """Let go of the end when all of it is dead: rows that stay for long are mostly in front."""
        if len(gone) and not self._alive[(first := int(gone.min())) : self._n].any():
            self._dead -= self._n - first
            self._n = first

    def clear(self) -> None:
        """Take every row out."""
        self._n = self._dead = 0
        self._allocate(64)
        self.next_visible = FAR
