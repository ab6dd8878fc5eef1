"""What happens when a lease ends or a delivery fails: attempts, and the delays between them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.event_rows import EventRows, run_starts
from rmq_pipeline.broker.failures.final_failure import give_up
from rmq_pipeline.broker.failures.giving_back import release
from rmq_pipeline.broker.receiving import queue_order
from rmq_pipeline.broker.receiving.consumption import Consumption
from rmq_pipeline.broker.receiving.lease_table import DOOMED, WAITING, LeaseTable, Rows
from rmq_pipeline.group import Group
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.events import Kind


@dataclass(frozen=True, slots=True)
class Ended:
    """Unsettled messages that may be delivered again now."""

    offset: Int64s
    #: Which delivery the next one is.
    attempt: Int32s
    group: Int64s
    #: What becomes of messages that have no attempt left, and of those behind them.
    events: list[EventRows] = field(default_factory=list)

    @property
    def doomed(self) -> bool:
        """Whether messages were marked for the dead letters."""
        return dooms(self.events)

    def __len__(self) -> int:
        return len(self.offset)

    def slice(self, start: int, stop: int) -> "Ended":
        """Some of the rows."""
        return Ended(self.offset[start:stop], self.attempt[start:stop], self.group[start:stop])


_NOTHING: Final = Ended(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64))


def ended_leases(consumption: Consumption, group: Group, *, now_ms: int) -> Ended:
    """What a receive may deliver again: retries that are due and leases that have ended."""
    rows = consumption.leases.visible(now_ms)
    if not len(rows):
        return _NOTHING
    if consumption.ordered:
        return _ended_in_order(consumption, group, rows=rows, now_ms=now_ms)
    if consumption.by_queue:
        return _ended_by_queue(consumption, group, now_ms=now_ms)
    leases = consumption.leases
    exhausted = leases.attempt[rows] >= group.max_attempts
    again = rows[~exhausted]
    return Ended(
        leases.offset[again],
        leases.attempt[again] + np.int32(1),
        leases.group[again],
        _given_up(consumption, rows[exhausted], group=group, now_ms=now_ms),
    )


def _given_up(
    consumption: Consumption, rows: Rows, *, group: Group, now_ms: int
) -> list[EventRows]:
    if not len(rows):
        return []
    return give_up(consumption, rows, policy=group.on_failure, now_ms=now_ms)


def dooms(events: Iterable[EventRows]) -> bool:
    """Whether these events mark messages for the dead letters."""
    return any(np.any(rows.column("delivery", np.int64) == DOOMED) for rows in events)


def _ended_in_order(consumption: Consumption, group: Group, *, rows: Rows, now_ms: int) -> Ended:
    """The same with order by message group: a group comes again as a whole, from its first on.

    It may when its first unsettled message may. That one's attempt counts; the later ones were
    only waiting behind it, so theirs does not. A message that was opened again in front of others
    that are with a receiver waits for those, and counts beside the first of them.
    """
    leases = consumption.leases
    rows = leases.of_groups(np.unique(leases.group[rows]))
    rows = rows[np.argsort(leases.group[rows], kind="stable")]
    starts = group_starts(leases.group[rows])
    heads = rows[starts]
    visible = (leases.visible_at[heads] <= now_ms) & (leases.delivery[heads] >= WAITING)
    first_leased = _first_leased(leases, rows, starts=starts)
    with_receiver = first_leased & (leases.visible_at[rows] > now_ms)
    visible &= ~np.logical_or.reduceat(with_receiver, starts)
    exhausted = visible & (leases.attempt[heads] >= group.max_attempts)
    sizes = np.diff(np.append(starts, len(rows)))
    is_head = np.zeros(len(rows), dtype=np.bool_)
    is_head[starts] = True
    events = _given_up(consumption, heads[exhausted], group=group, now_ms=now_ms)
    again = np.repeat(visible & ~exhausted, sizes) & ~_behind_backoff(
        leases, rows, starts=starts, now_ms=now_ms
    )
    taken = rows[again]
    counts = is_head[again] | first_leased[again] | (leases.delivery[taken] == WAITING)
    order = np.argsort(leases.offset[taken])
    taken, counts = taken[order], counts[order]
    attempt = leases.attempt[taken] + counts.astype(np.int32)
    return Ended(leases.offset[taken], attempt, leases.group[taken], events)


def _ended_by_queue(consumption: Consumption, group: Group, *, now_ms: int) -> Ended:
    """The same with order by queue: everything from the first unsettled message on, or nothing.

    Every delivery counts, of all of them. Only the first one fails for good by its lease's end:
    what lies behind it may never have been tried.
    """
    leases = consumption.leases
    if queue_order.blocked_until(leases) > now_ms:
        return _NOTHING
    first, *_ = unsettled = queue_order.unsettled(leases)
    if leases.attempt[first] >= group.max_attempts:
        events = _given_up(consumption, unsettled[:1], group=group, now_ms=now_ms)
        events.extend(queue_order.begun_again(leases, unsettled[1:], now_ms=now_ms))
        return Ended(_NOTHING.offset, _NOTHING.attempt, _NOTHING.group, events)
    rows = np.flatnonzero(leases.alive)
    before = queue_order.counted(leases, rows, max_attempts=group.max_attempts)
    return Ended(leases.offset[rows], before + np.int32(1), leases.group[rows])


def group_starts(groups: Int64s) -> Rows:
    """Where each message group begins in sorted hashes; without a group each row is its own."""
    starts = run_starts(groups)
    alone = np.flatnonzero(groups == 0)
    return np.union1d(starts, alone) if len(alone) else starts


def _first_leased(leases: LeaseTable, rows: Rows, *, starts: Rows) -> npt.NDArray[np.bool_]:
    """The first of each message group, in rows sorted by it, that was given to a receiver."""
    leased = leases.delivery[rows] > WAITING
    seen = np.cumsum(leased)
    before: Rows = np.repeat(seen[starts] - leased[starts], np.diff(np.append(starts, len(rows))))
    first: npt.NDArray[np.bool_] = leased & (seen == before + 1)
    return first


def _behind_backoff(
    leases: LeaseTable, rows: Rows, *, starts: Rows, now_ms: int
) -> npt.NDArray[np.bool_]:
    """Which rows, sorted by group, wait for a moment yet to come, or lie behind one that does."""
    delivery = leases.delivery[rows]
    waits = (delivery < WAITING) | ((delivery == WAITING) & (leases.visible_at[rows] > now_ms))
    seen = np.cumsum(waits)
    before = np.repeat(seen[starts] - waits[starts], np.diff(np.append(starts, len(rows))))
    behind: npt.NDArray[np.bool_] = seen > before
    return behind


def backoff_ms(group: Group, attempts: Int32s) -> Int64s:
    """The delay after the n-th delivery has failed."""
    distinct, place = np.unique(attempts, return_inverse=True)
    delays: Int64s = np.array([group.delay_ms(n) for n in distinct.tolist()], dtype=np.int64)
    return delays[place]


def expire(consumption: Consumption, group: Group, *, now_ms: int, limit: int) -> list[EventRows]:
    """What the revive job records of leases that have ended: they wait, or go to the dead letters.

    A message that waits already is left alone: it is visible as it is.
    """
    leases = consumption.leases
    rows = leases.visible(now_ms)[:limit]
    if not len(rows):
        return []
    if consumption.ordered:
        return _expire_in_order(consumption, group, rows=rows, now_ms=now_ms)
    if consumption.by_queue:
        failed = _ended_by_queue(consumption, group, now_ms=now_ms).events
        ended = rows[leases.delivery[rows] > WAITING]
        return failed or ([_expired(consumption, ended)] if len(ended) else [])
    exhausted = leases.attempt[rows] >= group.max_attempts
    ended = rows[~exhausted & (leases.delivery[rows] > WAITING)]
    events = _given_up(consumption, rows[exhausted], group=group, now_ms=now_ms)
    if len(ended):
        events.append(_expired(consumption, ended))
    return events


def _expire_in_order(
    consumption: Consumption, group: Group, *, rows: Rows, now_ms: int
) -> list[EventRows]:
    leases = consumption.leases
    ended = _ended_in_order(consumption, group, rows=rows, now_ms=now_ms)
    events = list(ended.events)
    rows = leases.find(ended.offset)
    rows = rows[leases.delivery[rows] > WAITING]
    by_group = rows[np.argsort(leases.group[rows], kind="stable")]
    heads = by_group[group_starts(leases.group[by_group])]
    later = np.setdiff1d(by_group, heads)
    if len(heads):
        events.append(_expired(consumption, heads))
    if len(later):
        events.extend(release(consumption, later, visible_at_ms=now_ms))
    return events


def _expired(consumption: Consumption, rows: Rows) -> EventRows:
    leases = consumption.leases
    return EventRows(
        kind=Kind.EXPIRE,
        at_ms=0,
        queue_offset=leases.offset[rows],
        attempt=leases.attempt[rows],
        visible_at_ms=leases.visible_at[rows],
        delivery=WAITING,
        message_group_hash=leases.group[rows],
    )
