"""Releasing the messages behind a failure: receipts become void, attempts do not count."""

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.state.consumption import Consumption
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.lease_table import WAITING, Rows
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import Kind


def release(
    consumption: Consumption,
    rows: Rows,
    *,
    visible_at_ms: int | Int64s,
    delivery: int = WAITING,
) -> list[EventRows]:
    """Build the events that release messages: receipts void, a running attempt not counted.

    Args:
        delivery: WAITING, or HELD if they must not be delivered.
    """
    leases = consumption.leases
    leased = leases.delivery[rows] > WAITING
    attempt = leases.attempt[rows] - leased.astype(np.int32)
    return [
        EventRows(
            kind=Kind.RELEASE,
            at_ms=0,
            queue_offset=leases.offset[rows],
            attempt=attempt,
            visible_at_ms=visible_at_ms,
            delivery=delivery,
            message_group_hash=leases.group[rows],
        )
    ]


def release_running(
    consumption: Consumption, chosen: npt.NDArray[np.bool_], *, now_ms: int
) -> list[EventRows]:
    """Release the chosen rows that a receiver holds now, without counting the attempt.

    A lease that has ended counts as a failed attempt, even if no event has recorded its end.
    """
    leases = consumption.leases
    running = leases.alive & (leases.delivery > WAITING) & (leases.visible_at > now_ms)
    rows = np.flatnonzero(running & chosen)
    return release(consumption, rows, visible_at_ms=now_ms) if len(rows) else []


def released_behind(
    consumption: Consumption, failed: Rows, *, visible_at: Int64s, settled: Int64s
) -> list[EventRows]:
    """Release the leased messages that failed ones block.

    A waiting message keeps its own time, which may be later than the failed message's.
    """
    leases = consumption.leases
    behind, first = consumption.behind(failed, settled=settled)
    leased = leases.delivery[behind] > WAITING
    if not leased.any():
        return []
    return release(consumption, behind[leased], visible_at_ms=visible_at[first[leased]])
