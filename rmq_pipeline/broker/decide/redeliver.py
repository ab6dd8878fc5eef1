"""Ended leases and failed deliveries: their attempts, and the delays between attempts."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa

from rmq_pipeline.broker.decide.final_failure import give_up
from rmq_pipeline.broker.decide.release import release
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.consumption import Consumption, QueueKey
from rmq_pipeline.broker.state.event_rows import EventRows
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
    due = consumption.due(rows, max_attempts=group.max_attempts, now_ms=now_ms)
    leases = consumption.leases
    events = _failed(consumption, due.exhausted, group=group, now_ms=now_ms)
    return Ended(leases.offset[due.rows], due.attempt, leases.group[due.rows], events)


def _failed(consumption: Consumption, rows: Rows, *, group: Group, now_ms: int) -> list[EventRows]:
    """Build the events of messages without an attempt left, and of the messages behind them."""
    if not len(rows):
        return []
    events = give_up(consumption, rows, policy=group.on_failure, now_ms=now_ms)
    return [*events, *consumption.begun_again(rows, settled=rows, now_ms=now_ms)]


def exhausts(events: Iterable[EventRows]) -> bool:
    """Return True if these events mark messages for the dead letters."""
    return any(np.any(rows.column("delivery", np.int64) == EXHAUSTED) for rows in events)


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
        attempt_id_hash=leases.attempt_id_hash[rows],
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
    due = consumption.due(rows, max_attempts=group.max_attempts, now_ms=now_ms)
    events = _failed(consumption, due.exhausted, group=group, now_ms=now_ms)
    ended, behind = consumption.ended(rows, due)
    if len(ended):
        events.append(_expired(consumption, ended))
    if len(behind):
        events.extend(release(consumption, behind, visible_at_ms=now_ms))
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
