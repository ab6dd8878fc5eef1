"""Messages that were leased and cannot be read: that delivery of them has failed.

Given back they would be the next ones again, and nobody would ever get what lies behind them.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa

from rmq_pipeline.broker.receiving.deliver import Delivery
from rmq_pipeline.broker.receiving.receiving import receipts_of
from rmq_pipeline.broker.settling.each import Renew
from rmq_pipeline.broker.settling.outcomes import RETRY, Outcomes
from rmq_pipeline.broker.settling.settle import Mask, Settle
from rmq_pipeline.errors import CorruptLogError, StorageError
from rmq_pipeline.failure import Failure
from rmq_pipeline.receipt import Receipts
from rmq_pipeline.rocketmq.attempts import part_of
from rmq_pipeline.rocketmq.bridge import Bridge

log = logging.getLogger(__name__)

#: What reading raises where the store is damaged, or lacks something.
UNREADABLE: Final = (CorruptLogError, StorageError, LookupError)

Read = Callable[[Delivery], Awaitable[list[Any]]]


async def sorted_out(
    delivery: Delivery, read: Read, *, bridge: Bridge, invisible_duration_ms: int, by_queue: bool
) -> tuple[Delivery, list[Any]]:
    """The part of a delivery that can be read, and its messages; the rest waits its backoff.

    In a message group nothing is given that lies behind a message that cannot be read, nor in a
    queue where the consumer group is in order ``by_queue``.

    Raises:
        OperatorError: nothing of it can be given.
        LookupError: the same.
    """
    wrong = np.zeros(len(delivery), dtype=np.bool_)
    why: Exception | None = None
    for row in range(len(delivery)):
        try:
            await read(part_of(delivery, np.arange(len(delivery)) == row))
        except UNREADABLE as error:
            wrong[row], why = True, error
    if why is not None:
        if by_queue:
            wrong = _and_what_is_behind(delivery, wrong)
        await bridge.submit(Settle(_failed(receipts_of(delivery).take(wrong), why)))
        log.error("%d messages of a receive cannot be read: %s", wrong.sum(), why)
    # Of a message group what lies behind was given back with the one that has failed.
    holds = await bridge.submit(Renew(receipts_of(delivery), invisible_duration_ms))
    rest = part_of(delivery, holds)
    if why is not None and not len(rest):
        raise why
    return rest, await read(rest) if len(rest) else []


def _and_what_is_behind(delivery: Delivery, wrong: Mask) -> Mask:
    parts, done = [], 0
    for _, taken in delivery.taken:
        parts.append(np.logical_or.accumulate(wrong[done : done + len(taken)]))
        done += len(taken)
    return np.concatenate(parts)


def _failed(receipts: Receipts, why: Exception) -> Outcomes:
    n = len(receipts)
    said = Failure.of(f"It cannot be read: {why}", error_type=type(why).__name__).to_json()
    return Outcomes(
        receipts,
        np.full(n, RETRY, dtype=np.int8),
        np.full(n, -1, dtype=np.int64),
        pa.repeat(pa.scalar(said, pa.string()), n),
    )
