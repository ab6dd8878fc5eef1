"""Ended leases and failed deliveries: their attempts, and the delays between attempts."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline.broker.decide.final_failure import give_up
from rmq_pipeline.broker.decide.release import release
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state import queue_order
from rmq_pipeline.broker.state.consumption import Consumption, QueueKey
from rmq_pipeline.broker.state.event_rows import EventRows, run_starts
from rmq_pipeline.broker.state.lease_table import EXHAUSTED, FAR, WAITING, LeaseTable, Rows
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.group import Group
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.events import Kind


@dataclass(frozen=True, slots=True)
class Ended:
    """Unsettled messages that may be redelivered now."""

    offset: Int64s
    #: Number of the next delivery.
    attempt: Int32s
    group: Int64s
    #: Events of the messages without an attempt left, and of the messages behind them.
    events: list[EventRows] = field(default_factory=list)

    @property
    def exhausted(self) -> bool:
        """Return True if messages were marked for the dead letters."""
        return exhausts(self.events)

    def __len__(self) -> int:
        return len(self.offset)

    def slice(self, start: int, stop: int) -> "Ended":
        """Return the rows ``[start, stop)``."""
        return Ended(self.offset[start:stop], self.attempt[start:stop], self.group[start:stop])


_NOTHING: Final = Ended(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64))


def ended_leases(consumption: Consumption, group: Group, *, now_ms: int) -> Ended:
    """Return what a receive may redeliver: retries that are due, and leases that have ended."""
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


def exhausts(events: Iterable[EventRows]) -> bool:
    """Return True if these events mark messages for the dead letters."""
    return any(np.any(rows.column("delivery", np.int64) == EXHAUSTED) for rows in events)


def _ended_in_order(consumption: Consumption, group: Group, *, rows: Rows, now_ms: int) -> Ended:
    """Return the same with order by message group: a group is redelivered as a whole.

    The group is due when its first unsettled message is due. The attempt of that message counts.
    The later leased messages are released, and their attempts do not count. A message from a
    redrive may wait in front of leased ones: then the group is due when their leases end, and the
    attempt of the first leased one counts too.
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
    """Return the same with order by queue: all messages from the first unsettled one on, or none.

    Every delivery counts, for all of them. At the end of the lease only the first message can
    be exhausted: the consumer may never have processed the later ones.
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
    """Return where each message group begins in sorted hashes. A row without a group is its own."""
    starts = run_starts(groups)
    alone = np.flatnonzero(groups == 0)
    return np.union1d(starts, alone) if len(alone) else starts


def _first_leased(leases: LeaseTable, rows: Rows, *, starts: Rows) -> npt.NDArray[np.bool_]:
    """Mark the first leased row of each message group, in rows sorted by group."""
    leased = leases.delivery[rows] > WAITING
    seen = np.cumsum(leased)
    before: Rows = np.repeat(seen[starts] - leased[starts], np.diff(np.append(starts, len(rows))))
    first: npt.NDArray[np.bool_] = leased & (seen == before + 1)
    return first


def _behind_backoff(
    leases: LeaseTable, rows: Rows, *, starts: Rows, now_ms: int
) -> npt.NDArray[np.bool_]:
    """Mark the rows, sorted by group, that wait for a future time or lie behind such a row."""
    delivery = leases.delivery[rows]
    waits = (delivery < WAITING) | ((delivery == WAITING) & (leases.visible_at[rows] > now_ms))
    seen = np.cumsum(waits)
    before = np.repeat(seen[starts] - waits[starts], np.diff(np.append(starts, len(rows))))
    behind: npt.NDArray[np.bool_] = seen > before
    return behind


def backoff_ms(group: Group, attempts: Int32s) -> Int64s:
    """Return the delay in ms after the n-th delivery has failed."""
    distinct, place = np.unique(attempts, return_inverse=True)
    delays: Int64s = np.array([group.delay_ms(n) for n in distinct.tolist()], dtype=np.int64)
    return delays[place]


def counted_in_place(
    leases: LeaseTable, rows: Rows, *, group: Group, said: pa.Array, now_ms: int
) -> EventRows:
    """Build the event of failed deliveries that go on as the next attempt under the same receipts.

    Args:
        group: its max_attempts caps the count. A consumer that retries more often decides itself
            when to reject the message.
        said: JSON of each failure, null without a report.
    """
    attempt = leases.attempt[rows]
    return EventRows(
        kind=Kind.INVISIBLE,
        at_ms=now_ms,
        queue_offset=leases.offset[rows],
        attempt=np.maximum(attempt, np.minimum(attempt + 1, group.max_attempts)).astype(np.int32),
        visible_at_ms=leases.visible_at[rows],
        delivery=leases.delivery[rows],
        epoch=leases.epoch[rows],
        message_group_hash=leases.group[rows],
        detail=None if said.null_count == len(said) else said.to_pylist(),
    )


def expire(consumption: Consumption, group: Group, *, now_ms: int, limit: int) -> list[EventRows]:
    """Build the events of ended leases for revive: the messages wait, or go to the dead letters.

    A message that waits already gets no event: a receive finds it as it is.
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


@dataclass(frozen=True, slots=True)
class Revive(Request):
    """Request that records ended leases of all groups."""

    limit: int
    window: tuple[str, int] | None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return (revived, parked, marked, when the next lease ends) as the answer.

        ``marked`` is above 0 if messages wait for dead-lettering.
        """
        state.fence(self.window)
        decision = Decision()
        revived, parked, exhausted, next_visible = 0, 0, 0, FAR
        for key, consumption in state.consumptions.items():
            group = state.groups.get(key[0])
            if group is None or not len(consumption.leases):
                continue
            found: list[EventRows] = []
            if now_ms >= consumption.leases.next_visible and revived < self.limit:
                found = expire(consumption, group, now_ms=now_ms, limit=self.limit - revived)
                for events in found:
                    again = events.column("delivery", np.int64) == WAITING
                    revived += int(again.sum()) if events.kind != Kind.QUARANTINE else 0
                    parked += len(events) if events.kind == Kind.PARK else 0
                decision.events.extend(QueueKey._make(key).events(found, now_ms))
            leases = consumption.leases
            running = leases.alive & (leases.delivery > WAITING) & (leases.visible_at > now_ms)
            if running.any():
                next_visible = min(next_visible, int(leases.visible_at[running].min()))
            exhausted += len(consumption.leases.exhausted()) + exhausts(found)
        decision.answer = (
            revived,
            parked,
            exhausted,
            None if next_visible == FAR else next_visible,
        )
        return decision
