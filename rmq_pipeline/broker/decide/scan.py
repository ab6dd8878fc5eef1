"""Scanning a queue for messages to deliver, without order."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.decide.redeliver import Ended, ended_leases, exhausts
from rmq_pipeline.broker.state.consumption import Consumption
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.filter_cache import QueueFilter
from rmq_pipeline.broker.state.queue_index import PAGE_ROWS, IndexRows
from rmq_pipeline.broker.state.state import Queue
from rmq_pipeline.group import Group
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.events import Kind

#: Most rows one receive scans in one queue; keeps frames short under sparse filters.
SCAN_ROWS = 65_536
#: Fewest rows scanned together if there is a filter.
FILTERED_ROWS = 1024
#: Attempts of messages delivered for the first time; no chunk of the read-ahead has more rows.
_FIRST = np.ones(PAGE_ROWS, dtype=np.int32)
_FIRST.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Taken:
    """Messages to deliver, in offset order."""

    offset: Int64s
    #: Number of this delivery; the first is 1.
    attempt: Int32s
    group: Int64s
    #: Place of the body; position -1: unknown here.
    position: Int64s
    row: Int32s

    def __len__(self) -> int:
        return len(self.offset)


def _joined(parts: Sequence[Taken]) -> Taken:
    if len(parts) == 1:
        return parts[0]
    whole = Taken(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Taken)))
    order = np.argsort(whole.offset, kind="stable")
    return Taken(*(getattr(whole, f.name)[order] for f in fields(Taken)))


NOTHING = Taken(
    offset=np.zeros(0, np.int64),
    attempt=np.zeros(0, np.int32),
    group=np.zeros(0, np.int64),
    position=np.zeros(0, np.int64),
    row=np.zeros(0, np.int32),
)


class Asked(NamedTuple):
    """Arguments of a receive that its scans use."""

    group: Group
    now_ms: int
    #: Hash of the attempt id; 0: a call without one.
    attempt_id_hash: int
    #: True if the receive may return the lease of an earlier call of the same attempt.
    repeats: bool


class QueueScan:
    """One receive's scan of one queue: ended leases first, then rows from the cursor on.

    The scan reads the state and changes nothing; ``taken`` and ``progress_events`` return its
    result.
    """

    #: True if it returns a batch that an earlier call of the same attempt has leased.
    again = False
    #: Hash of the attempt id, which the leases keep; 0: they keep none.
    attempt_id_hash = 0

    def __init__(
        self,
        queue: Queue,
        consumption: Consumption,
        *,
        row_filter: QueueFilter | None,
        asked: Asked,
    ) -> None:
        self.queue = queue
        self.consumption = consumption
        self.ended = self._ended(asked)
        #: Filter; None: all messages.
        self.row_filter = row_filter
        self.cursor = max(consumption.cursor, queue.min_offset)
        self.page_wanted: tuple[int, int] | None = None
        #: Rows from the cursor on whose filter result is unknown.
        self.unjudged: list[IndexRows] = []
        self.scanned_out = False
        self.has_exhausted = False
        self._scanned = 0
        self._ended_done = 0
        self._parts: list[Taken] = []
        #: Filter results of the last rows.
        self._results = np.zeros(0, dtype=np.bool_)

    def _ended(self, asked: Asked) -> Ended:
        """Return what may be redelivered."""
        return ended_leases(self.consumption, asked.group, now_ms=asked.now_ms)

    def may_have_more(self) -> bool:
        """Return True if ``take`` might find another message."""
        return self._ended_done < len(self.ended) or self._fresh_left()

    def _fresh_left(self) -> bool:
        return (
            self.cursor < self.queue.max_offset
            and self.page_wanted is None
            and not self.unjudged
            and not self.scanned_out
        )

    def take(self, limit: int) -> int:
        """Take up to ``limit`` messages; return how many were taken."""
        found = self._take_ended(limit)
        if found < limit and self._fresh_left():
            found += self._take_fresh(limit - found)
        return found

    def _take_ended(self, limit: int) -> int:
        some = self.ended.slice(self._ended_done, self._ended_done + limit)
        if len(some):
            self._ended_done += len(some)
            position, row = self.queue.index.locate(some.offset)
            self._parts.append(Taken(some.offset, some.attempt, some.group, position, row))
        return len(some)

    def _take_fresh(self, limit: int) -> int:
        found = 0
        while found < limit and self._fresh_left():
            rows = self._next_rows(limit - found)
            if rows is None:
                break
            chosen = self._wanted(rows)
            if chosen is None:
                self._deliver(rows, slice(0, len(rows)))
                found += len(rows)
                self.cursor += len(rows)
                continue
            at = np.flatnonzero(chosen)
            if len(at) > limit - found:
                at = at[: limit - found]
                self.cursor += int(at[-1]) + 1
            else:
                self.cursor += len(rows)
            if len(at):
                self._deliver(rows, at)
                found += len(at)
        return found

    def _ahead(self, limit: int) -> int:
        """Return how many rows to scan for ``limit`` messages."""
        return limit if self.row_filter is None else max(limit, FILTERED_ROWS)

    def _next_rows(self, limit: int) -> IndexRows | None:
        """Return the rows from the cursor on, more than ``limit`` if a filter may drop some.

        Return None if rows or filter results must be loaded first.
        """
        stop = min(self.queue.max_offset, self.cursor + self._ahead(limit))
        rows = self.queue.index.get(self.cursor, stop)
        if rows is None:
            self.page_wanted = self.queue.index.missing(self.cursor, self.queue.max_offset)
            return None
        if self.row_filter is not None:
            self._results = self.row_filter.results(rows)
            if not len(self._results):
                self.unjudged = self._rows_ahead(self.row_filter.ahead)
                return None
            rows = rows.first(len(self._results))
        self._scanned += len(rows)
        self.scanned_out = self._scanned >= SCAN_ROWS + limit
        return rows

    def _rows_ahead(self, ahead: int) -> list[IndexRows]:
        """Return rows from the cursor on, to the end of a page or of the read-ahead."""
        found: list[IndexRows] = []
        offset = self.cursor
        stop = min(self.queue.max_offset, -(-(offset + ahead) // PAGE_ROWS) * PAGE_ROWS)
        while offset < stop and (rows := self.queue.index.get(offset, stop)) is not None:
            found.append(rows)
            offset += len(rows)
        return found

    def _wanted(self, rows: IndexRows) -> npt.NDArray[np.bool_] | None:
        """Mark the rows to deliver; None: all."""
        return None if self.row_filter is None else self._results

    def _deliver(self, rows: IndexRows, at: npt.NDArray[np.intp] | slice) -> None:
        position = rows.position[at]
        if isinstance(at, slice):
            offsets = np.arange(rows.base + at.start, rows.base + at.stop, dtype=np.int64)
        else:
            offsets = at + rows.base
        first = _FIRST[: len(position)]
        self._parts.append(
            Taken(offsets, first, rows.message_group_hash[at], position, rows.row[at])
        )

    def is_idle(self) -> bool:
        """Return True if the scan took, skipped and found nothing, and needs nothing loaded."""
        return not (
            self._parts
            or self.ended.events
            or exhausts(self.ended.events)
            or self.has_exhausted
            or self.scanned_out
            or self.page_wanted is not None
            or self.unjudged
            or self.cursor > self.consumption.cursor
        )

    def taken(self) -> Taken:
        """Return all messages taken, in offset order."""
        return _joined(self._parts) if self._parts else NOTHING

    def progress_events(self, taken: Taken, now_ms: int) -> list[EventRows]:
        """Return a CURSOR event, unless the leases imply the cursor."""
        implied = max(self.consumption.cursor, int(taken.offset[-1]) + 1 if len(taken) else 0)
        if self.cursor <= implied:
            return []
        return [EventRows(kind=Kind.CURSOR, at_ms=0, queue_offset=np.array([self.cursor]))]

    def skipped(self) -> tuple[Int64s, Int64s] | None:
        """Return the message groups and offsets of skipped messages that wait; None: none."""
        return None

    def backlog_wanted(self) -> list[int]:
        """Return the message groups whose backlog must be looked up."""
        return []
