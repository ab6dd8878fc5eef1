"""State of one consumer group on one message queue, and its change by events.

The class is the order of the group on that queue, chosen when the group first receives from it:
``Consumption`` has none, ``ByGroup`` (group_order.py) has order by message group, and ``ByQueue``
(queue_order.py) has order by queue. Requests ask it, and need not know which it is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.lease_table import WAITING, LeaseTable, Rows
from rmq_pipeline.group import OnFailure
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.events import REMOVES_ROW, Kind

NO_ROWS: Final[Rows] = np.zeros(0, dtype=np.intp)
Mask = npt.NDArray[np.bool_]


class Redelivery(NamedTuple):
    """Unsettled messages of a queue that may be redelivered now, as rows of its lease table."""

    #: Rows to redeliver, by offset, and the number of the next delivery of each.
    rows: Rows
    attempt: Int32s
    #: Rows without an attempt left.
    exhausted: Rows


@dataclass(slots=True)
class Backlog:
    """Messages of one message group behind the cursor that were never delivered."""

    #: Offsets of the first of them, ascending.
    known: list[int] = field(default_factory=list)
    #: More may follow at or after this offset, before the cursor; None: ``known`` is complete.
    more_from: int | None = None


class Consumption:
    """State of one (consumer group, topic, queue) without order: no message waits for another."""

    __slots__ = ("cursor", "failures", "leases", "resets", "touched")

    #: State that only order by message group keeps.
    held: Mapping[int, int] = MappingProxyType({})
    backlog: Mapping[int, Backlog] = MappingProxyType({})
    ready: Mapping[int, None] = MappingProxyType({})
    quarantined: Mapping[int, str] = MappingProxyType({})

    def __init__(self) -> None:
        self.touched = False
        self.cursor = 0
        #: Number of resets of the group's offset.
        self.resets = 0
        self.leases = LeaseTable()
        #: JSON of the last failure of an unsettled message, by offset, if the consumer reported
        #: one.
        self.failures: dict[int, str] = {}

    def committed_offset(self) -> int:
        """Return the smallest offset that is not settled."""
        first = self.leases.first_offset()
        return self.cursor if first is None else min(first, self.cursor)

    def waiting(self) -> int:
        """Return how many messages behind the cursor were never delivered, as far as known."""
        return 0

    def has_nothing(self, end: int, now_ms: int, *, may_repeat: bool) -> bool:
        """Return True if a receive can skip the queue.

        The cursor is at ``end``, no group is ready, and no lease is visible. ``may_repeat``: the
        receive has an attempt id, and returns the batch of an earlier call that had the same one.
        """
        leases = self.leases
        return (
            self.touched
            and self.cursor >= end
            and not self.ready
            and (now_ms < leases.next_visible or not len(leases))
        )

    def next_after(self, now_ms: int) -> int | None:
        """Return when an invisible message becomes visible by itself; None: none will."""
        return self.leases.next_after(now_ms)

    def is_blocked(self, now_ms: int) -> bool:
        """Return True if no message of the queue may be delivered now."""
        return False

    def unsettled_before(self, offset: int) -> bool:
        """Return True if a message before ``offset`` was scanned and is not settled."""
        first = self.leases.first_offset()
        return first is not None and first < offset

    def due(self, rows: Rows, *, max_attempts: int, now_ms: int) -> Redelivery:
        """Return what may be redelivered.

        Args:
            rows: all visible rows, or the first ones; not empty.
        """
        leases = self.leases
        exhausted = leases.attempt[rows] >= max_attempts
        again = rows[~exhausted]
        return Redelivery(again, leases.attempt[again] + np.int32(1), rows[exhausted])

    def ended(self, rows: Rows, due: Redelivery) -> tuple[Rows, Rows]:
        """Return the leased rows whose end counts as a failed attempt, and rows to release.

        Args:
            rows: the visible rows that ``due`` was asked about.
        """
        return due.rows[self.leases.delivery[due.rows] > WAITING], NO_ROWS

    def behind(self, failed: Rows, *, settled: Int64s) -> tuple[Rows, Rows]:
        """Return the leased or waiting messages that a failed delivery blocks.

        Args:
            settled: offsets that are settled in the same step.

        Returns:
            Rows, and for each row the index into ``failed`` of the message that blocks it.
        """
        return NO_ROWS, NO_ROWS

    def before_stops(self, failed: Rows, stops: Mask) -> Mask:
        """Mark the failed rows that count.

        The others lie behind a row in ``stops``, which releases the messages behind it.
        """
        return np.ones(len(failed), dtype=np.bool_)

    def expired_before(self, rows: Rows, now_ms: int) -> Rows:
        """Return the leased rows that are void because an earlier lease has ended."""
        return NO_ROWS

    def behind_parked(self, offsets: Int64s, *, groups: Int64s) -> Mask:
        """Mark the messages behind a parked message: they wait for unpark."""
        return np.zeros(len(offsets), dtype=np.bool_)

    def blameless(self, spent: Mask) -> Mask:
        """Mark the failed rows whose attempts do not count.

        Args:
            spent: mask of the rows without an attempt left, of all failed rows by offset.
        """
        return np.zeros_like(spent)

    def begun_again(self, failed: Rows, *, settled: Rows, now_ms: int) -> list[EventRows]:
        """Reset the attempts of messages redelivered only because of the first of ``failed``.

        Args:
            failed: rows that failed permanently.
            settled: rows that are settled in the same step.
        """
        return []

    def policy(self, on_failure: OnFailure) -> OnFailure:
        """Return the group's policy as it applies here: no message group is quarantined."""
        return "dead_letter" if on_failure == "dead_letter_group" else on_failure

    def handled_first(self, rows: Rows) -> Rows:
        """Return the leased rows that a listener handles first: one of each message group."""
        groups = self.leases.group[rows]
        _, first = np.unique(groups, return_index=True)
        return rows[np.union1d(first, np.flatnonzero(groups == 0))]

    def acks(self, done: Rows, *, settled: Rows = NO_ROWS, now_ms: int) -> list[EventRows]:
        """Build the events of acks.

        Args:
            done: rows that are acked now, ascending.
            settled: rows that are settled otherwise in the same step.
        """
        return [acked(self.leases, done, now_ms=now_ms)] if len(done) else []

    def acks_wake(self) -> bool:
        """Return True if acks may have made other messages visible since the last call."""
        return False

    def apply(self, events: EventRows) -> None:
        """Apply the events to the state."""
        self.touched = True
        kind = events.kind
        if kind in REMOVES_ROW:
            self._remove(events)
        elif kind <= Kind.ACK_AHEAD:
            self._set(events)
        elif kind in (Kind.CURSOR, Kind.OFFSET_UPDATED):
            self.cursor = max(self.cursor, int(events.queue_offset.max()))
        elif kind == Kind.RESET:
            self._reset(int(events.queue_offset[-1]))
            self.resets += int(np.count_nonzero(events.column("delivery", np.int64) >= 0))

    def _remove(self, events: EventRows) -> None:
        offsets = events.queue_offset
        if not (offsets[1:] > offsets[:-1]).all():
            offsets = np.unique(offsets)
        rows = self.leases.find(offsets)
        rows = rows[rows >= 0]
        groups = self.leases.group[rows]
        self.leases.remove(rows)
        if self.failures:
            for offset in events.queue_offset.tolist():
                self.failures.pop(offset, None)
        self._count(groups, -1)

    def _set(self, events: EventRows) -> None:
        offsets = events.queue_offset
        groups = events.column("message_group_hash", np.int64)
        new = self.leases.upsert(
            offsets,
            attempt=events.column("attempt", np.int32),
            visible_at=events.column("visible_at_ms", np.int64),
            delivery=events.column("delivery", np.int64),
            epoch=events.column("epoch", np.int64),
            attempt_id_hash=events.column("attempt_id_hash", np.int64),
            group=groups,
        )
        if events.kind == Kind.LEASE:
            self.cursor = max(self.cursor, int(offsets.max()) + 1)
        if len(new):
            self._count(groups[new], 1)
        if events.detail is not None:
            for row, offset in enumerate(offsets.tolist()):
                if said := events.detail_of(row):
                    self.failures[offset] = said

    def _count(self, groups: Int64s, sign: int) -> None:
        """Count ``sign`` for each new or removed row of these message groups."""

    def _reset(self, offset: int) -> None:
        self.leases.clear()
        self.failures.clear()
        self.cursor = offset


def acked(leases: LeaseTable, rows: Rows, *, now_ms: int) -> EventRows:
    """Build the ACK event of rows."""
    return EventRows(
        kind=Kind.ACK,
        at_ms=now_ms,
        queue_offset=leases.offset[rows],
        attempt=leases.attempt[rows],
        delivery=leases.delivery[rows],
        epoch=leases.epoch[rows],
        message_group_hash=leases.group[rows],
    )


class QueueKey(NamedTuple):
    """One consumer group on one queue."""

    group_id: int
    topic_id: int
    queue_id: int

    def events(self, rows: Iterable[EventRows], now_ms: int) -> list[EventRows]:
        """Return the events with this group and queue, and with the current time."""
        return [
            replace(
                one,
                at_ms=now_ms,
                group_id=self.group_id,
                topic_id=self.topic_id,
                queue_id=self.queue_id,
            )
            for one in rows
        ]
