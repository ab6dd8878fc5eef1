"""State of one consumer group on one message queue, and its change by events."""

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from rmq_pipeline.broker.state.event_rows import EventRows, run_starts
from rmq_pipeline.broker.state.lease_table import WAITING, LeaseTable, Rows
from rmq_pipeline.broker.state.queue_order import blocked_until, free_after
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import REMOVES_ROW, Kind

#: Offsets kept in memory of the backlog of one message group.
KNOWN_PER_GROUP = 1024
#: Offsets kept in memory of all backlogs of a queue together.
KNOWN_PER_QUEUE = 262_144


@dataclass(slots=True)
class Backlog:
    """Messages of one message group behind the cursor that were never delivered."""

    #: Offsets of the first of them, ascending.
    known: list[int] = field(default_factory=list)
    #: More may follow at or after this offset, before the cursor; None: ``known`` is complete.
    more_from: int | None = None


@dataclass(frozen=True, slots=True)
class Skipped:
    """Offsets of groups that a receive skipped: index data for memory, not an event."""

    group_id: int
    topic_id: int
    queue_id: int
    message_group_hash: Int64s
    queue_offset: Int64s


class Consumption:
    """State of one (consumer group, topic, queue).

    With order by message group, ``held`` counts the unsettled deliveries of each message group.
    Such a group is blocked for all clients until its deliveries are settled or have ended. The
    messages of the group that a receive skips meanwhile are its ``backlog``. ``ready`` are the
    groups with a backlog and nothing held. With order by queue the leases hold the whole state
    (queue_order.py).
    """

    __slots__ = (
        "_backlog_from",
        "backlog",
        "by_queue",
        "cursor",
        "eases",
        "failures",
        "held",
        "known",
        "leases",
        "ordered",
        "quarantined",
        "ready",
        "resets",
        "told_eases",
        "touched",
    )

    def __init__(self, *, ordered: bool, by_queue: bool = False) -> None:
        self.ordered = ordered
        self.by_queue = by_queue
        self.touched = False
        self.cursor = 0
        #: Number of resets of the group's offset.
        self.resets = 0
        self.leases = LeaseTable()
        #: With order by queue: how often acks have ended the block or moved its end forward, and
        #: how many of these changes the waiting receives were told of. The writer counts; another
        #: thread tells.
        self.eases = 0
        self.told_eases = -1
        self.held: dict[int, int] = {}
        self.backlog: dict[int, Backlog] = {}
        self.ready: dict[int, None] = {}
        #: JSON of the last failure of an unsettled message, by offset, if the consumer reported
        #: one.
        self.failures: dict[int, str] = {}
        #: Quarantined message groups, and the failure of each as JSON.
        self.quarantined: dict[int, str] = {}
        #: Number of offsets in all backlogs together.
        self.known = 0
        #: No backlog begins before this offset; exact after ``unsettled_before``.
        self._backlog_from = 0

    def committed_offset(self) -> int:
        """Return the smallest offset that is not settled."""
        first = self.leases.first_offset()
        lowest = self.cursor if first is None else min(first, self.cursor)
        for entry in self.backlog.values():
            lowest = min(lowest, entry.known[0] if entry.known else entry.more_from or lowest)
        return lowest

    def has_nothing(self, end: int, now_ms: int) -> bool:
        """Return True if a receive can skip the queue.

        The cursor is at ``end``, no group is ready, and no lease is visible.
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
        if self.by_queue:
            return free_after(self.leases, now_ms)
        return self.leases.next_after(now_ms)

    def unsettled_before(self, offset: int) -> bool:
        """Return True if a message before ``offset`` was scanned and is not settled."""
        first = self.leases.first_offset()
        if first is not None and first < offset:
            return True
        if self.backlog and self._backlog_from < offset:
            entries = self.backlog.values()
            firsts = (e.known[0] if e.known else e.more_from for e in entries)
            self._backlog_from = min((at for at in firsts if at is not None), default=offset)
        return bool(self.backlog) and self._backlog_from < offset

    def apply(self, events: EventRows) -> None:
        """Apply the events to the state."""
        self.touched = True
        kind = events.kind
        if self.by_queue and kind in (Kind.ACK, Kind.ACK_AHEAD):
            self._ack_in_order(events)
        elif kind in REMOVES_ROW:
            self._remove(events)
        elif kind <= Kind.ACK_AHEAD:
            self._set(events)
        elif kind in (Kind.CURSOR, Kind.OFFSET_UPDATED):
            self.cursor = max(self.cursor, int(events.queue_offset.max()))
        elif kind == Kind.RESET:
            self._reset(int(events.queue_offset[-1]))
            self.resets += int(np.count_nonzero(events.column("delivery", np.int64) >= 0))
        elif kind == Kind.BEHIND:
            self._behind(events)
        elif kind == Kind.QUARANTINE:
            groups = events.column("message_group_hash", np.int64).tolist()
            self.quarantined.update(
                (group, events.detail_of(row)) for row, group in enumerate(groups)
            )
        elif kind == Kind.LIFT:
            for group in events.column("message_group_hash", np.int64).tolist():
                self.quarantined.pop(group, None)
        elif kind == Kind.CAUGHT_UP:
            for group in events.column("message_group_hash", np.int64).tolist():
                gone = self.backlog.pop(group, None)
                self.known -= len(gone.known) if gone else 0
                self.ready.pop(group, None)

    def _ack_in_order(self, events: EventRows) -> None:
        before = blocked_until(self.leases)
        if events.kind == Kind.ACK:
            self._remove(events)
        else:
            self._set(events)
        self.eases += blocked_until(self.leases) < before

    def was_eased(self) -> bool:
        """Return True if acks may have unblocked the queue since the last call.

        Order by queue only.
        """
        eases = self.eases
        told, self.told_eases = self.told_eases, eases
        return eases != told

    def _remove(self, events: EventRows) -> None:
        rows = self.leases.find(np.unique(events.queue_offset))
        rows = rows[rows >= 0]
        groups = self.leases.group[rows]
        self.leases.remove(rows)
        if self.failures:
            for offset in events.queue_offset.tolist():
                self.failures.pop(offset, None)
        if self.ordered:
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
            group=groups,
        )
        if events.kind == Kind.LEASE:
            self.cursor = max(self.cursor, int(offsets.max()) + 1)
        if self.ordered and len(new):
            self._count(groups[new], 1)
        if events.detail is not None:
            for row, offset in enumerate(offsets.tolist()):
                if said := events.detail_of(row):
                    self.failures[offset] = said

    def _count(self, groups: Int64s, sign: int) -> None:
        """Add ``sign`` per message to the held deliveries of the groups."""
        distinct, counts = np.unique(groups[groups != 0], return_counts=True)
        held = self.held
        for group, n in zip(distinct.tolist(), counts.tolist(), strict=True):
            left = held.get(group, 0) + sign * n
            if left > 0:
                held[group] = left
                self.ready.pop(group, None)
            else:
                held.pop(group, None)
                if group in self.backlog:
                    self.ready[group] = None

    def _behind(self, events: EventRows) -> None:
        groups = events.column("message_group_hash", np.int64).tolist()
        for group, offset in zip(groups, events.queue_offset.tolist(), strict=True):
            entry = self.backlog.get(group)
            if entry is None:
                entry = self.backlog[group] = Backlog(more_from=offset)
                self._backlog_from = min(self._backlog_from, offset)
            gone = bisect.bisect_left(entry.known, offset)
            if gone:
                del entry.known[:gone]
                self.known -= gone
            if entry.more_from is not None:
                entry.more_from = max(entry.more_from, offset)
            if group not in self.held:
                self.ready[group] = None

    def _reset(self, offset: int) -> None:
        self.leases.clear()
        self.held.clear()
        self.backlog.clear()
        self.ready.clear()
        self.known = 0
        self.failures.clear()
        self.quarantined.clear()
        self.cursor = offset

    def learn(self, skipped: Skipped) -> None:
        """Keep the offsets that a receive skipped, group by group, up to the limits."""
        groups, offsets = skipped.message_group_hash, skipped.queue_offset
        if (groups == groups[0]).all():
            self._learn(int(groups[0]), offsets)
            return
        order = np.argsort(groups, kind="stable")
        groups, offsets = groups[order], offsets[order]
        bounds = [*run_starts(groups).tolist(), len(groups)]
        for start, stop in itertools.pairwise(bounds):
            self._learn(int(groups[start]), offsets[start:stop])

    def _learn(self, group: int, offsets: Int64s) -> None:
        entry = self.backlog.get(group)
        if entry is None:
            return
        if entry.more_from is not None and entry.more_from != int(offsets[0]):
            return  # older ones are still unknown; the look-up finds these too
        entry.more_from = None
        room = max(0, min(KNOWN_PER_GROUP - len(entry.known), KNOWN_PER_QUEUE - self.known))
        known = offsets[:room].tolist()
        entry.known.extend(known)
        self.known += len(known)
        if room < len(offsets):
            entry.more_from = int(offsets[room])

    def wanting(self) -> list[int]:
        """Return the ready message groups whose next message is not in memory."""
        return [group for group in self.ready if not self.backlog[group].known]

    def looked_up(
        self,
        groups: Sequence[int],
        offsets: Sequence[list[int]],
        *,
        starts: Sequence[int],
        more_from: Sequence[int | None],
        stop: int,
    ) -> dict[int, Backlog]:
        """Return the backlogs that a look-up of ``groups`` before ``stop`` has found.

        It has all offsets of a group, or the first ones.

        Another look-up may have been faster, and its messages may be settled. So a result is
        dropped if the backlog begins elsewhere by now; the next look-up reads it again.
        """
        found = {}
        for group, some, start, more in zip(groups, offsets, starts, more_from, strict=True):
            entry = self.backlog.get(group)
            if entry is None or entry.known or entry.more_from != start:
                continue
            rest = stop if stop < self.cursor else None
            found[group] = Backlog(some, rest if more is None else more)
        return found

    def fill_backlogs(self, looked_up: Mapping[int, Backlog]) -> None:
        """Add what was looked up to the groups that still have a backlog."""
        for group, entry in looked_up.items():
            if group in self.backlog:
                self.backlog[group] = entry
                self.known += len(entry.known)

    def empty_backlogs(self, looked_up: Mapping[int, Backlog]) -> list[EventRows]:
        """Return CAUGHT_UP events for ready groups whose backlog turned out to be empty."""
        entries = ((group, looked_up.get(group, self.backlog[group])) for group in self.wanting())
        empty = [group for group, one in entries if not one.known and one.more_from is None]
        if not empty:
            return []
        groups = np.array(empty, dtype=np.int64)
        offsets = np.full(len(empty), -1, dtype=np.int64)
        return [
            EventRows(kind=Kind.CAUGHT_UP, at_ms=0, queue_offset=offsets, message_group_hash=groups)
        ]

    def expired_before(self, rows: Rows, now_ms: int) -> Rows:
        """Return the leased rows that are void: an earlier lease of their group has ended."""
        none = np.zeros(0, dtype=np.intp)
        leases = self.leases
        if not self.ordered or now_ms < leases.next_visible:
            return none
        # A waiting row in front of leased ones was added by a redrive: it waits for them. Leased
        # rows behind a row marked for the dead letters were kept on purpose; others were released.
        over = (leases.visible_at <= now_ms) & (leases.delivery > WAITING)
        ended = np.flatnonzero(leases.alive & over & (leases.group != 0))
        if not len(ended):
            return none
        order = np.lexsort((leases.offset[ended], leases.group[ended]))
        groups = leases.group[ended][order]
        firsts = run_starts(groups)
        at = np.searchsorted(groups[firsts], leases.group[rows])
        at[at == len(firsts)] = 0
        same = groups[firsts][at] == leases.group[rows]
        earlier = leases.offset[ended][order][firsts][at] < leases.offset[rows]
        void: Rows = rows[same & earlier]
        return void


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
