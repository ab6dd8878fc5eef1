"""Order by message group: one receiver at a time per group; no group waits for another.

A receive leases a group's next messages in order. The group is then held until each of them is
settled or its lease has ended. Its messages that the cursor passes meanwhile become the group's
backlog.
"""

from collections.abc import Mapping

import numpy as np

from rmq_pipeline.broker.decide.redeliver import Ended, exhausted_with_group, release
from rmq_pipeline.broker.decide.scan import Asked, QueueScan, Taken
from rmq_pipeline.broker.state.consumption import Consumption
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.filter_cache import Mask, QueueFilter
from rmq_pipeline.broker.state.group_order import ByGroup
from rmq_pipeline.broker.state.lease_table import WAITING
from rmq_pipeline.broker.state.queue_index import IndexRows
from rmq_pipeline.broker.state.queue_order import ByQueue
from rmq_pipeline.broker.state.state import Queue
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import Kind

#: Most message groups in one look-up of backlogs.
LOOK_UP_GROUPS = 4096
#: Up to this number of blocked groups, comparing a whole page with each group is faster than
#: looking up each message.
FEW_GROUPS = 64
_COMPARED = 16
#: Rows that a scan reads beyond the wanted number: first, and most.
_WINDOW_ROWS = 128
_MOST_WINDOW_ROWS = 1024
#: Rows from the cursor whose blocked messages are not counted as ready.
COUNTED_ROWS = 4096
#: Share of a frame for the messages of quarantined groups that one scan dead-letters. Each has its
#: own copy of the failure. The share is small so that all queues of a topic fit into one frame.
GIVEN_UP_BYTES = 512 * 1024
_GIVEN_UP_ROW_BYTES = 256


class GroupScan(QueueScan):
    """Scan with order by message group.

    It takes ended leases first, then backlogs, then rows from the cursor on.
    """

    consumption: ByGroup

    def __init__(
        self, queue: Queue, consumption: ByGroup, *, row_filter: QueueFilter | None, asked: Asked
    ) -> None:
        super().__init__(queue, consumption, row_filter=row_filter, asked=asked)
        #: Number of messages taken from the backlog of each ready group.
        self._from_backlog: dict[int, int] = {}
        #: Message groups whose backlog may be delivered.
        self._open = self._open_groups() if consumption.ready else []
        self._ready = iter(self._open)
        self._ready_left = bool(self._open)
        #: Skipped messages that wait: groups and offsets, ascending in each group.
        self._passed: list[tuple[Int64s, Int64s]] = []
        self._window = _WINDOW_ROWS
        #: Quarantined message groups, and the failure of each as JSON.
        self._quarantined: Mapping[int, str] = consumption.quarantined
        #: Messages of quarantined groups, for the dead letters: groups and offsets.
        self._given_up: list[tuple[Int64s, Int64s]] = []
        self._given_up_bytes = 0
        #: Rows of blocked and of quarantined groups in the last page; None: there are none.
        self._last_passed: Mask | None = None
        self._last_quarantined: Mask | None = None

    def _open_groups(self) -> list[int]:
        return list(self.consumption.ready)

    def may_have_more(self) -> bool:
        """Return True if ``take`` might find another message."""
        return self._ready_left or super().may_have_more()

    def is_idle(self) -> bool:
        """Return True if the scan took, skipped and found nothing, and needs nothing loaded."""
        return not self._open and super().is_idle()

    def take(self, limit: int) -> int:
        """Take up to ``limit`` messages; return how many were taken."""
        found = self._take_ended(limit)
        if found < limit and self._ready_left:
            found += self._take_backlog(limit - found)
        if found < limit and self._fresh_left():
            found += self._take_fresh(limit - found)
        return found

    def _take_backlog(self, limit: int) -> int:
        """Take waiting messages of ready groups, a fair share of each."""
        backlog = self.consumption.backlog
        share = max(1, limit // max(1, len(self._open)))
        offsets: list[int] = []
        groups: list[int] = []
        while len(offsets) < limit:
            group = next(self._ready, None)
            if group is None:
                self._ready_left = False
                break
            known = backlog[group].known
            if group in self._quarantined:
                self._give_up_backlog(group, np.array(known, dtype=np.int64))
                if self.scanned_out:
                    self._ready_left = False
                    break
                continue
            n = min(len(known), max(share, 16), limit - len(offsets))
            if n:
                offsets.extend(known[i] for i in range(n))
                groups.extend([group] * n)
                self._from_backlog[group] = n
        if offsets:
            at = np.array(offsets, dtype=np.int64)
            order = np.argsort(at)
            at = at[order]
            position, row = self.queue.index.locate(at)
            first = np.ones(len(at), dtype=np.int32)
            group_of = np.array(groups, dtype=np.int64)[order]
            self._parts.append(Taken(at, first, group_of, position, row))
        return len(offsets)

    def _give_up_backlog(self, group: int, offsets: Int64s) -> None:
        n = self._give_up(np.full(len(offsets), group, dtype=np.int64), offsets)
        if n:
            self._from_backlog[group] = n

    def _give_up(self, groups: Int64s, offsets: Int64s) -> int:
        """Mark messages for the dead letters, as many as the frame has space for; return how many.

        The first call marks at least one. If some are left over, the scan stops (``scanned_out``).
        """
        distinct, place = np.unique(groups, return_inverse=True)
        texts = [len(self._quarantined[group]) for group in distinct.tolist()]
        sizes = np.array(texts, dtype=np.int64)[place] + _GIVEN_UP_ROW_BYTES
        ends = self._given_up_bytes + np.cumsum(sizes)
        n = int(np.searchsorted(ends, GIVEN_UP_BYTES, side="right"))
        if not self._given_up:
            n = min(max(n, 1), len(groups))
        if n:
            self._given_up.append((groups[:n], offsets[:n]))
            self._given_up_bytes = int(ends[n - 1])
            self.has_exhausted = True
        self.scanned_out |= n < len(groups)
        return n

    def _ahead(self, limit: int) -> int:
        """Return how many rows to read: more than ``limit``, as blocked groups leave gaps.

        The surplus doubles with each call, up to _MOST_WINDOW_ROWS.
        """
        if self.row_filter is not None:
            return super()._ahead(limit)
        ahead = limit + self._window
        self._window = min(2 * self._window, _MOST_WINDOW_ROWS)
        return ahead

    def _wanted(self, rows: IndexRows) -> Mask | None:
        """Mark rows that match the filter and whose group is free.

        Remember the other groups' rows.
        """
        free = super()._wanted(rows)
        self._last_passed = self._last_quarantined = None
        blocked = self._blocked(rows.message_group_hash)
        if blocked is not None:
            self._last_passed = blocked if free is None else blocked & free
            free = ~blocked if free is None else free & ~blocked
        quarantined = self._in_quarantine(rows.message_group_hash)
        if quarantined is not None:
            self._last_quarantined = quarantined if free is None else quarantined & free
            free = ~quarantined if free is None else free & ~quarantined
        return free

    def _in_quarantine(self, groups: Int64s) -> Mask | None:
        """Mark the messages of quarantined groups; None: there are none."""
        quarantined = self._quarantined
        if not quarantined:
            return None
        return _among(groups, list(quarantined))

    def _blocked(self, groups: Int64s) -> Mask | None:
        """Mark the messages of groups that must not be delivered; None: there are none."""
        return blocked_groups(self.consumption, groups)

    def _take_fresh(self, limit: int) -> int:
        found = 0
        while found < limit and self._fresh_left():
            rows = self._next_rows(limit - found)
            if rows is None:
                break
            chosen = self._wanted(rows)
            stop = min(len(rows), limit - found)
            if chosen is None:
                self._deliver(rows, slice(0, stop))
                found += stop
                self.cursor += stop
                continue
            at = chosen.nonzero()[0]
            stop = len(rows)
            if len(at) > limit - found:
                at = at[: limit - found]
                stop = int(at[-1]) + 1
            stop = self._pass(rows, stop)
            at = at[at < stop]
            self.cursor += stop
            if len(at):
                self._deliver(rows, at)
                found += len(at)
        return found

    def _pass(self, rows: IndexRows, stop: int) -> int:
        """Record the messages of blocked and quarantined groups that the cursor passes.

        Return the row where the cursor stops: earlier than ``stop`` if the frame has no space to
        dead-letter the next message.
        """
        mask = self._last_quarantined
        if mask is not None and len(at := mask[:stop].nonzero()[0]):
            n = self._give_up(rows.message_group_hash[at], at + rows.base)
            stop = stop if n == len(at) else int(at[n])
        mask = self._last_passed
        if mask is not None and len(at := mask[:stop].nonzero()[0]):
            self._passed.append((rows.message_group_hash[at], at + rows.base))
        return stop

    def progress_events(self, taken: Taken, now_ms: int) -> list[EventRows]:
        """Return the events of the cursor, of groups with a new backlog, and of emptied ones."""
        events = [*super().progress_events(taken, now_ms), *self._cut_off(taken, now_ms)]
        behind: dict[int, int] = {}
        caught_up: list[int] = []
        backlog = self.consumption.backlog
        for group, n in self._from_backlog.items():
            entry = backlog[group]
            if n < len(entry.known):
                behind[group] = entry.known[n]
            elif entry.more_from is not None:
                behind[group] = max(entry.more_from, entry.known[n - 1] + 1)
            else:
                caught_up.append(group)
        if self._passed:
            self._note_passed(behind, caught_up)
        events.extend(self._dooms(now_ms))
        if caught_up:
            events.append(_of_groups(Kind.CAUGHT_UP, caught_up, offsets=[-1] * len(caught_up)))
        if behind:
            events.append(_of_groups(Kind.BEHIND, list(behind), offsets=list(behind.values())))
        return events

    def _dooms(self, now_ms: int) -> list[EventRows]:
        """Return the events that mark messages of quarantined groups for the dead letters."""
        return [
            exhausted_with_group(
                offsets,
                groups,
                failures=self._quarantined,
                attempt=np.zeros(len(groups), dtype=np.int32),
                now_ms=now_ms,
            )
            for groups, offsets in self._given_up
        ]

    def _cut_off(self, taken: Taken, now_ms: int) -> list[EventRows]:
        """Release the rest of a redelivered group that the limit cut off.

        These messages were leased, but only waited behind the first one. Released now, their
        attempts do not count later.
        """
        rest = self.ended.slice(self._ended_done, len(self.ended))
        if not len(rest):
            return []
        leases = self.consumption.leases
        # Messages without a message group are not ordered: nothing waits behind them.
        waiting = (rest.group != 0) & np.isin(rest.group, taken.group)
        rows = leases.find(rest.offset[waiting])
        rows = rows[leases.delivery[rows] > WAITING]
        return release(self.consumption, rows, visible_at_ms=now_ms) if len(rows) else []

    def _note_passed(self, behind: dict[int, int], caught_up: list[int]) -> None:
        """Add groups that had no backlog before, each from its first skipped message on."""
        groups, offsets = self._all_passed()
        backlog = self.consumption.backlog
        new = {g for g in set(groups.tolist()) if g not in backlog}.union(caught_up)
        if new:
            distinct, firsts = np.unique(groups, return_index=True)
            heads = zip(distinct.tolist(), offsets[firsts].tolist(), strict=True)
            behind.update({group: offset for group, offset in heads if group in new})

    def _all_passed(self) -> tuple[Int64s, Int64s]:
        if len(self._passed) > 1:
            groups, offsets = zip(*self._passed, strict=True)
            self._passed = [(np.concatenate(groups), np.concatenate(offsets))]
        return self._passed[0]

    def skipped(self) -> tuple[Int64s, Int64s] | None:
        """Return the message groups and offsets of skipped messages that wait."""
        return self._all_passed() if self._passed else None

    def backlog_wanted(self) -> list[int]:
        """Return the ready groups whose next message is not in memory."""
        backlog = self.consumption.backlog
        return [group for group in self._open if not backlog[group].known][:LOOK_UP_GROUPS]


def blocked_groups(consumption: Consumption, groups: Int64s) -> Mask | None:
    """Mark messages at or after the cursor whose group is blocked; None: there are none."""
    held, backlog = consumption.held, consumption.backlog
    if not held and not backlog:
        return None
    if len(held) + len(backlog) <= FEW_GROUPS:
        return _among(groups, list({**held, **backlog}))
    return np.fromiter(
        (group in held or group in backlog for group in groups.tolist()),
        dtype=np.bool_,
        count=len(groups),
    )


def ready_from_cursor(queue: Queue, consumption: Consumption) -> int:
    """Count messages from the cursor on; blocked ones among the next COUNTED_ROWS are left out."""
    offset = consumption.cursor
    ready = queue.max_offset - offset
    if consumption.held or consumption.backlog:
        stop = min(queue.max_offset, offset + COUNTED_ROWS)
        while offset < stop and (rows := queue.index.get(offset, stop)) is not None:
            waits = blocked_groups(consumption, rows.message_group_hash)
            ready -= 0 if waits is None else int(np.count_nonzero(waits))
            offset += len(rows)
    return ready


def _among(groups: Int64s, few: list[int]) -> Mask | None:
    """Mark the groups that are in ``few``; None: no row is.

    Some comparisons are faster than a search.
    """
    if len(few) > _COMPARED:
        found = np.isin(groups, np.array(few, dtype=np.int64))
    else:
        found = groups == few[0]
        for group in few[1:]:
            found |= groups == group
    return found if np.count_nonzero(found) else None


def _of_groups(kind: Kind, groups: list[int], *, offsets: list[int]) -> EventRows:
    return EventRows(
        kind=kind,
        at_ms=0,
        queue_offset=np.array(offsets, dtype=np.int64),
        message_group_hash=np.array(groups, dtype=np.int64),
    )


class BatchScan(QueueScan):
    """Scan in order by queue: all messages from the first unsettled one on, or none."""

    consumption: ByQueue

    def __init__(
        self, queue: Queue, consumption: ByQueue, *, row_filter: QueueFilter | None, asked: Asked
    ) -> None:
        super().__init__(queue, consumption, row_filter=row_filter, asked=asked)
        self.attempt_id_hash = asked.attempt_id_hash
        self._max_attempts = asked.group.max_attempts
        #: True if no message may be delivered for the first time.
        self._closed = self.again or bool(self.ended.events) or consumption.is_blocked(asked.now_ms)

    def _ended(self, asked: Asked) -> Ended:
        """Return what may be redelivered; the client of the same attempt gets its batch again."""
        if asked.attempt_id_hash and asked.repeats:
            rows = self.consumption.of_attempt(asked.attempt_id_hash, now_ms=asked.now_ms)
            self.again = len(rows) > 0
            if self.again:
                leases = self.consumption.leases
                return Ended(leases.offset[rows], leases.attempt[rows], leases.group[rows])
        return super()._ended(asked)

    def _fresh_left(self) -> bool:
        return not self._closed and super()._fresh_left()

    def progress_events(self, taken: Taken, now_ms: int) -> list[EventRows]:
        """Return the cursor event, and events that reopen messages acked behind the batch."""
        events = super().progress_events(taken, now_ms)
        if len(taken) and not self.again:
            last, most = int(taken.offset[-1]), self._max_attempts
            events.extend(self.consumption.reopened(last, max_attempts=most, now_ms=now_ms))
        return events
