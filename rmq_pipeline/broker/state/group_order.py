"""Order by message group: the state of a group on a queue, and its rules.

A message group with leased messages is held: no client gets another message of it. Messages that
the cursor passes meanwhile become its backlog.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from rmq_pipeline.broker.state.consumption import (
    NO_ROWS,
    Backlog,
    Consumption,
    Mask,
    Redelivery,
)
from rmq_pipeline.broker.state.event_rows import EventRows, run_starts
from rmq_pipeline.broker.state.lease_table import PARKED, WAITING, LeaseTable, Rows
from rmq_pipeline.group import OnFailure
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import Kind

#: Offsets kept in memory of the backlog of one message group.
KNOWN_PER_GROUP = 1024
#: Offsets kept in memory of all backlogs of a queue together.
KNOWN_PER_QUEUE = 262_144


class ByGroup(Consumption):
    """State of a consumer group on a queue, with order by message group.

    ``held`` counts the unsettled deliveries of each message group. Such a group is blocked for all
    clients until its deliveries are settled or have ended. The messages of the group that a receive
    skips meanwhile are its ``backlog``. ``ready`` are the groups with a backlog and nothing held.
    """

    __slots__ = ("_backlog_from", "backlog", "held", "known", "quarantined", "ready")

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.backlog: dict[int, Backlog] = {}
        self.ready: dict[int, None] = {}
        #: Quarantined message groups, and the failure of each as JSON.
        self.quarantined: dict[int, str] = {}
        #: Number of offsets in all backlogs together.
        self.known = 0
        #: No backlog begins before this offset; exact after ``unsettled_before``.
        self._backlog_from = 0

    def committed_offset(self) -> int:
        """Return the smallest offset that is not settled."""
        lowest = super().committed_offset()
        for entry in self.backlog.values():
            lowest = min(lowest, entry.known[0] if entry.known else entry.more_from or lowest)
        return lowest

    def waiting(self) -> int:
        """Return how many messages behind the cursor were never delivered, as far as known."""
        return self.known

    def unsettled_before(self, offset: int) -> bool:
        """Return True if a message before ``offset`` was scanned and is not settled."""
        if super().unsettled_before(offset):
            return True
        if self.backlog and self._backlog_from < offset:
            entries = self.backlog.values()
            firsts = (e.known[0] if e.known else e.more_from for e in entries)
            self._backlog_from = min((at for at in firsts if at is not None), default=offset)
        return bool(self.backlog) and self._backlog_from < offset

    def due(self, rows: Rows, *, max_attempts: int, now_ms: int) -> Redelivery:
        """Return what may be redelivered: each message group as a whole.

        The group is due when its first unsettled message is due. The attempt of that message
        counts. The later leased messages are released, and their attempts do not count. A message
        from a redrive may wait in front of leased ones: then the group is due when their leases
        end, and the attempt of the first leased one counts too.
        """
        leases = self.leases
        rows = leases.of_groups(np.unique(leases.group[rows]))
        rows = rows[np.argsort(leases.group[rows], kind="stable")]
        starts = _group_starts(leases.group[rows])
        heads = rows[starts]
        visible = (leases.visible_at[heads] <= now_ms) & (leases.delivery[heads] >= WAITING)
        first_leased = _first_leased(leases, rows, starts=starts)
        with_receiver = first_leased & (leases.visible_at[rows] > now_ms)
        visible &= ~np.logical_or.reduceat(with_receiver, starts)
        exhausted = visible & (leases.attempt[heads] >= max_attempts)
        sizes = np.diff(np.append(starts, len(rows)))
        is_head = np.zeros(len(rows), dtype=np.bool_)
        is_head[starts] = True
        again = np.repeat(visible & ~exhausted, sizes) & ~_behind_backoff(
            leases, rows, starts=starts, now_ms=now_ms
        )
        taken = rows[again]
        counts = is_head[again] | first_leased[again] | (leases.delivery[taken] == WAITING)
        order = np.argsort(leases.offset[taken])
        taken, counts = taken[order], counts[order]
        return Redelivery(taken, leases.attempt[taken] + counts.astype(np.int32), heads[exhausted])

    def ended(self, rows: Rows, due: Redelivery) -> tuple[Rows, Rows]:
        """Return the leased rows whose end counts, the heads of groups, and the rows behind."""
        leases = self.leases
        leased = due.rows[leases.delivery[due.rows] > WAITING]
        by_group = leased[np.argsort(leases.group[leased], kind="stable")]
        heads = by_group[_group_starts(leases.group[by_group])]
        return heads, np.setdiff1d(by_group, heads)

    def behind(self, failed: Rows, *, settled: Int64s) -> tuple[Rows, Rows]:
        """Return the leased or waiting messages behind the first failed message of their group."""
        leases = self.leases
        failed_groups = np.unique(leases.group[failed])
        of_groups = leases.of_groups(failed_groups[failed_groups != 0])
        gone = np.concatenate([settled, leases.offset[failed]])
        rest = of_groups[leases.delivery[of_groups] >= WAITING]
        rest = rest[~np.isin(leases.offset[rest], gone)]
        if not len(rest):
            return rest, rest
        order = np.lexsort((leases.offset[failed], leases.group[failed]))
        groups = leases.group[failed][order]
        firsts = run_starts(groups)
        first = order[firsts[np.searchsorted(groups[firsts], leases.group[rest])]]
        behind = leases.offset[rest] > leases.offset[failed][first]
        return rest[behind], first[behind]

    def before_stops(self, failed: Rows, stops: Mask) -> Mask:
        """Mark the failed rows that do not lie behind a row of their group that stops it."""
        keep, stopped = np.ones(len(failed), dtype=np.bool_), set()
        for i, group in enumerate(self.leases.group[failed].tolist()):  # failures are few
            if group in stopped:
                keep[i] = False
            elif stops[i] and group:
                stopped.add(group)
        return keep

    def expired_before(self, rows: Rows, now_ms: int) -> Rows:
        """Return the leased rows that are void: an earlier lease of their group has ended."""
        leases = self.leases
        if now_ms < leases.next_visible:
            return NO_ROWS
        # A waiting row in front of leased ones was added by a redrive: it waits for them. Leased
        # rows behind a row marked for the dead letters were kept on purpose; others were released.
        over = (leases.visible_at <= now_ms) & (leases.delivery > WAITING)
        ended = np.flatnonzero(leases.alive & over & (leases.group != 0))
        if not len(ended):
            return NO_ROWS
        order = np.lexsort((leases.offset[ended], leases.group[ended]))
        groups = leases.group[ended][order]
        firsts = run_starts(groups)
        at = np.searchsorted(groups[firsts], leases.group[rows])
        at[at == len(firsts)] = 0
        same = groups[firsts][at] == leases.group[rows]
        earlier = leases.offset[ended][order][firsts][at] < leases.offset[rows]
        void: Rows = rows[same & earlier]
        return void

    def behind_parked(self, offsets: Int64s, *, groups: Int64s) -> Mask:
        """Mark the messages behind a parked message of their group: they wait for unpark."""
        leases = self.leases
        parked = np.flatnonzero(leases.alive & (leases.delivery == PARKED) & (leases.group != 0))
        if not len(parked):
            return super().behind_parked(offsets, groups=groups)
        known, firsts = np.unique(leases.group[parked], return_index=True)
        at = np.minimum(np.searchsorted(known, groups), len(known) - 1)
        behind: Mask = (known[at] == groups) & (leases.offset[parked[firsts[at]]] < offsets)
        return behind

    def policy(self, on_failure: OnFailure) -> OnFailure:
        """Return the policy as it is: a message group can be quarantined."""
        return on_failure

    def acks_wake(self) -> bool:
        """Return True: an acked message may free its group."""
        return True

    def apply(self, events: EventRows) -> None:
        """Apply the events to the state."""
        super().apply(events)
        kind = events.kind
        if kind == Kind.BEHIND:
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
        super()._reset(offset)
        self.held.clear()
        self.backlog.clear()
        self.ready.clear()
        self.known = 0
        self.quarantined.clear()

    def learn(self, groups: Int64s, offsets: Int64s) -> None:
        """Keep the offsets that a receive skipped, group by group, up to the limits."""
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
        dropped if the backlog begins elsewhere by now; the next look-up reads it again. A state
        that was rebuilt from the log meanwhile may have its cursor before ``stop``, because the
        frame that moved it was not stored. Messages from the cursor on are no backlog: they would
        be delivered twice.
        """
        if stop > self.cursor:
            return {}
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


def _group_starts(groups: Int64s) -> Rows:
    """Return where each message group begins in sorted hashes. A row without a group is its own."""
    starts = run_starts(groups)
    alone = np.flatnonzero(groups == 0)
    return np.union1d(starts, alone) if len(alone) else starts


def _first_leased(leases: LeaseTable, rows: Rows, *, starts: Rows) -> Mask:
    """Mark the first leased row of each message group, in rows sorted by group."""
    leased = leases.delivery[rows] > WAITING
    seen = np.cumsum(leased)
    before: Rows = np.repeat(seen[starts] - leased[starts], np.diff(np.append(starts, len(rows))))
    first: Mask = leased & (seen == before + 1)
    return first


def _behind_backoff(leases: LeaseTable, rows: Rows, *, starts: Rows, now_ms: int) -> Mask:
    """Mark the rows, sorted by group, that wait for a future time or lie behind such a row."""
    delivery = leases.delivery[rows]
    waits = (delivery < WAITING) | ((delivery == WAITING) & (leases.visible_at[rows] > now_ms))
    seen = np.cumsum(waits)
    before = np.repeat(seen[starts] - waits[starts], np.diff(np.append(starts, len(rows))))
    behind: Mask = seen > before
    return behind
