"""Unsettled deliveries of one consumer group on one queue, as columns sorted by offset."""

from typing import Any

import numpy as np
import numpy.typing as npt

from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.events import Delivery

Rows = npt.NDArray[np.intp]
Columns = dict[str, npt.NDArray[Any]]
FAR = np.iinfo(np.int64).max
#: Values of ``delivery`` without a lease, as plain numbers for columns.
WAITING = int(Delivery.WAITING)
EXHAUSTED = int(Delivery.EXHAUSTED)
PARKED = int(Delivery.PARKED)
HELD = int(Delivery.HELD)
AHEAD = int(Delivery.ACKED_AHEAD)


class LeaseTable:
    """Rows of messages that were delivered and are not settled.

    A removed row is only marked (``alive`` false) until half of the table is dead. So a settle of
    few rows in a large table costs little.
    """

    _COLUMNS = (
        *("offset", "attempt", "visible_at", "delivery", "epoch", "attempt_id_hash", "group"),
        "alive",
    )

    def __init__(self) -> None:
        self._n = 0
        self._dead = 0
        self._allocate(64)
        #: No alive row becomes visible before this time; exact after ``visible``.
        self.next_visible = FAR

    def _allocate(self, capacity: int) -> None:
        self._offset = np.empty(capacity, np.int64)
        self._attempt = np.empty(capacity, np.int32)
        self._visible_at = np.empty(capacity, np.int64)
        self._delivery = np.empty(capacity, np.int64)
        self._epoch = np.empty(capacity, np.int64)
        self._attempt_id_hash = np.empty(capacity, np.int64)
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
        """Number of deliveries that count so far."""
        return self._attempt[: self._n]

    @property
    def visible_at(self) -> Int64s:
        """End of the lease, or the time from which a waiting row may be redelivered."""
        return self._visible_at[: self._n]

    @property
    def delivery(self) -> Int64s:
        """Delivery number of the receipt; without a lease, WAITING or another state."""
        return self._delivery[: self._n]

    @property
    def epoch(self) -> Int64s:
        """Epoch of the window that holds the lease; 0: none."""
        return self._epoch[: self._n]

    @property
    def attempt_id_hash(self) -> Int64s:
        """Hash of the attempt id of the receive that leased it, in order by queue; 0: none."""
        return self._attempt_id_hash[: self._n]

    @property
    def group(self) -> Int64s:
        """Hash of the message group (message_group_hash); 0: none."""
        return self._group[: self._n]

    @property
    def alive(self) -> npt.NDArray[np.bool_]:
        """False for a removed row."""
        return self._alive[: self._n]

    def find(self, offsets: Int64s) -> Rows:
        """Return the row of each offset, -1 for none."""
        if self._n == 0:
            return np.full(len(offsets), -1, dtype=np.intp)
        rows = np.searchsorted(self.offset, offsets)
        rows[rows == self._n] = 0
        rows[(self._offset[rows] != offsets) | ~self._alive[rows]] = -1
        return rows

    def first_offset(self) -> int | None:
        """Return the smallest unsettled offset."""
        if len(self) == 0:
            return None
        return int(self._offset[int(np.argmax(self.alive))])

    def visible(self, now_ms: int) -> Rows:
        """Return the rows visible at ``now_ms``, and make ``next_visible`` exact."""
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
        """Return when the next invisible row becomes visible; None: there is none."""
        if len(self) == 0:
            return None
        later = self.visible_at[
            self.alive & (self.delivery >= WAITING) & (self.visible_at > now_ms)
        ]
        return int(later.min()) if len(later) else None

    def of_groups(self, groups: Int64s) -> Rows:
        """Return the alive rows of these message groups, in offset order."""
        if not len(groups):
            return np.zeros(0, dtype=np.intp)
        if len(groups) == 1:
            return np.flatnonzero(self.alive & (self.group == groups[0]))
        return np.flatnonzero(self.alive & np.isin(self.group, groups))

    def unsettled(self) -> Rows:
        """Return the rows of messages that are not acked."""
        return np.flatnonzero(self.alive & (self.delivery != AHEAD))

    def exhausted(self) -> Rows:
        """Return the rows that are marked for the dead letters."""
        return np.flatnonzero(self.alive & (self.delivery == EXHAUSTED))

    def parked(self) -> Rows:
        """Return the rows that are parked, or held behind a parked one."""
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
        attempt_id_hash: Int64s,
        group: Int64s,
    ) -> Rows:
        """Insert or update rows; return the indices into the arguments of the inserted ones."""
        columns: Columns = {
            "_attempt": attempt,
            "_visible_at": visible_at,
            "_delivery": delivery,
            "_epoch": epoch,
            "_attempt_id_hash": attempt_id_hash,
            "_group": group,
        }
        open_rows = delivery >= WAITING
        if open_rows.any():
            self.next_visible = min(self.next_visible, int(visible_at[open_rows].min()))
        if self._n == 0 or offsets.min() > self._offset[self._n - 1]:
            if len(offsets) > 1 and np.any(np.diff(offsets) <= 0):
                order = np.argsort(offsets, kind="stable")
                offsets = offsets[order]
                columns = {name: values[order] for name, values in columns.items()}
            self._append(offsets, columns)
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
        """Remove these alive rows."""
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
        """Drop the end of the table if all of it is dead.

        Long-lived rows are mostly at the front, so this frees most removed rows at once.
        """
        if len(gone) and not self._alive[(first := int(gone.min())) : self._n].any():
            self._dead -= self._n - first
            self._n = first

    def clear(self) -> None:
        """Remove all rows."""
        self._n = self._dead = 0
        self._allocate(64)
        self.next_visible = FAR
