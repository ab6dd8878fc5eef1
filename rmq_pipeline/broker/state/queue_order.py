"""Order by queue, like RocketMQ's orderly pop: one batch of a queue at a time.

A receive leases a queue's next messages as a batch, which blocks the queue. The block ends when
each message of the batch is settled or due again (its lease or its retry delay has ended). Then all
messages from the first unsettled one on are redelivered, including later ones that were acked. An
acked message behind an unsettled one stays as AHEAD until it is redelivered, or until nothing
before it is unsettled.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.lease_table import AHEAD, FAR, WAITING, LeaseTable, Rows
from rmq_pipeline.message import Int32s
from rmq_pipeline.store.events import Kind

_NONE: Final[Rows] = np.zeros(0, dtype=np.intp)


def unsettled(leases: LeaseTable) -> Rows:
    """Return the rows of messages that are not acked; redelivery begins at the first."""
    return np.flatnonzero(leases.alive & (leases.delivery != AHEAD))


def blocked_until(leases: LeaseTable) -> int:
    """Return the time until which the queue is blocked.

    FAR while a message is parked or marked for the dead letters; 0 if nothing is unsettled.
    """
    rows = unsettled(leases)
    if not len(rows):
        return 0
    if leases.delivery[rows].min() < WAITING:
        return FAR
    return int(leases.visible_at[rows].max())


def free_after(leases: LeaseTable, now_ms: int) -> int | None:
    """Return when a blocked queue becomes free by itself.

    None: it is free, or only a settle or unpark frees it.
    """
    until = blocked_until(leases)
    return until if now_ms < until < FAR else None


def of_attempt(leases: LeaseTable, attempt: int, *, now_ms: int) -> Rows:
    """Return the rows of a batch that an earlier call of the same attempt leased.

    Empty if that batch is not the one that blocks the queue.
    """
    rows = unsettled(leases)
    running = leases.visible_at[rows] > now_ms
    mine = running & (leases.delivery[rows] > WAITING) & (leases.epoch[rows] == attempt)
    if not mine.any():
        return _NONE
    last = int(np.flatnonzero(mine)[-1])
    if not mine[: last + 1].all() or running[last + 1 :].any():
        return _NONE
    chosen: Rows = rows[mine]
    return chosen


def acks(leases: LeaseTable, done: Rows, *, settled: Rows = _NONE, now_ms: int) -> list[EventRows]:
    """Build the events of acks; an ack behind an unsettled message becomes AHEAD.

    Args:
        done: rows that are acked now, ascending.
        settled: rows that are settled otherwise in the same step.
    """
    left = leases.alive & (leases.delivery != AHEAD)
    left[done] = False
    left[settled] = False
    gap = int(np.argmax(left)) if left.any() else len(left)
    held_up = np.flatnonzero((leases.alive & (leases.delivery == AHEAD))[:gap])
    past = np.union1d(done[done < gap], held_up)
    ahead = done[done > gap]
    events = []
    if len(past):
        events.append(acked(leases, past, now_ms=now_ms))
    if len(ahead):
        events.append(
            EventRows(
                kind=Kind.ACK_AHEAD,
                at_ms=now_ms,
                queue_offset=leases.offset[ahead],
                attempt=leases.attempt[ahead],
                visible_at_ms=FAR,
                delivery=AHEAD,
                message_group_hash=leases.group[ahead],
            )
        )
    return events


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


def behind_first(spent: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Mark the rows behind the first one without an attempt left, which caused their redelivery."""
    behind: npt.NDArray[np.bool_] = np.cumsum(spent) > spent
    return behind


def spared(leases: LeaseTable, failed: Rows, *, settled: Rows, now_ms: int) -> list[EventRows]:
    """Reset the attempts of unsettled rows behind the first failed row, unless settled with it."""
    if not len(failed):
        return []
    rows = np.setdiff1d(unsettled(leases), settled)
    return begun_again(leases, rows[rows > failed[0]], now_ms=now_ms)


def begun_again(leases: LeaseTable, rows: Rows, *, now_ms: int) -> list[EventRows]:
    """Reset the attempts of messages redelivered only because an earlier one failed permanently.

    A leased message is at its first attempt now, and its receipt stays valid. Messages that are
    parked or marked for the dead letters failed themselves and keep their attempts.
    """
    rows = rows[leases.delivery[rows] >= WAITING]
    if not len(rows):
        return []
    running = (leases.delivery[rows] > WAITING) & (leases.visible_at[rows] > now_ms)
    return [
        EventRows(
            kind=Kind.INVISIBLE,
            at_ms=now_ms,
            queue_offset=leases.offset[rows],
            attempt=running.astype(np.int32),
            visible_at_ms=leases.visible_at[rows],
            delivery=leases.delivery[rows],
            epoch=leases.epoch[rows],
            message_group_hash=leases.group[rows],
        )
    ]


def counted(leases: LeaseTable, rows: Rows, *, max_attempts: int) -> Int32s:
    """Return the deliveries that count; an acked row did not fail, so it keeps one attempt."""
    attempts = leases.attempt[rows]
    acked_before = leases.delivery[rows] == AHEAD
    capped: Int32s = np.where(acked_before, np.minimum(attempts, max_attempts - 1), attempts)
    return capped


def reopened(leases: LeaseTable, beyond: int, *, max_attempts: int, now_ms: int) -> list[EventRows]:
    """Make acked messages behind the end of a redelivered batch available again.

    Args:
        beyond: the last offset of the batch.
    """
    rows = np.flatnonzero(leases.alive & (leases.delivery == AHEAD) & (leases.offset > beyond))
    if not len(rows):
        return []
    return [
        EventRows(
            kind=Kind.RELEASE,
            at_ms=now_ms,
            queue_offset=leases.offset[rows],
            attempt=counted(leases, rows, max_attempts=max_attempts),
            visible_at_ms=now_ms,
            delivery=WAITING,
            message_group_hash=leases.group[rows],
        )
    ]
