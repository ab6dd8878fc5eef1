"""Giving back what lies unsettled behind a failure: receipts void, attempts not counted."""

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.event_rows import EventRows, run_starts
from rmq_pipeline.broker.receiving.consumption import Consumption
from rmq_pipeline.broker.receiving.lease_table import WAITING, LeaseTable, Rows
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import Kind


def release(
    consumption: Consumption,
    rows: Rows,
    *,
    visible_at_ms: int | Int64s,
    delivery: int = WAITING,
) -> list[EventRows]:
    """Give messages back: receipts void, the attempt of a running delivery not counted.

    Args:
        delivery: WAITING, or HELD when they are not to be delivered.
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
    """Give back at once what of the chosen rows is with a receiver, for whom it was no attempt.

    A lease that has ended by itself has failed: it counts, whether or not it was seen to.
    """
    leases = consumption.leases
    running = leases.alive & (leases.delivery > WAITING) & (leases.visible_at > now_ms)
    rows = np.flatnonzero(running & chosen)
    return release(consumption, rows, visible_at_ms=now_ms) if len(rows) else []


def released_behind(
    consumption: Consumption, failed: Rows, *, visible_at: Int64s, settled: Int64s
) -> list[EventRows]:
    """What of the failed messages' groups lies behind them and is leased is given back.

    What waits already keeps its own moment: it may be later than the failed one's.
    """
    leases = consumption.leases
    behind, first = unsettled_behind(leases, failed, settled=settled)
    leased = leases.delivery[behind] > WAITING
    if not leased.any():
        return []
    return release(consumption, behind[leased], visible_at_ms=visible_at[first[leased]])


def unsettled_behind(leases: LeaseTable, failed: Rows, *, settled: Int64s) -> tuple[Rows, Rows]:
    """What is leased or waits behind the first failed message of its message group.

    Args:
        failed: rows, of which none lies behind another.
        settled: offsets that are settled in the same step.

    Returns:
        Rows, and for each which of the failed ones is the first of its group.
    """
    failed_groups = np.unique(leases.group[failed])
    of_groups = leases.of_groups(failed_groups[failed_groups != 0])
    gone = np.concatenate([settled, leases.offset[failed]])
    rest = of_groups[leases.delivery[of_groups] >= WAITING]
    rest = rest[~np.isin(leases.offset[rest], gone)]
    order = np.lexsort((leases.offset[failed], leases.group[failed]))
    groups = leases.group[failed][order]
    firsts = run_starts(groups)
    if not len(rest):
        return rest, rest
    first = order[firsts[np.searchsorted(groups[firsts], leases.group[rest])]]
    behind = leases.offset[rest] > leases.offset[failed][first]
    return rest[behind], first[behind]
