"""Messages that were leased and cannot be read: that delivery of them has failed.

Given back they would be the next ones again, and nobody would ever get what lies behind them.
"""

import logging
from typing import Final

import numpy as np
import pyarrow as pa

from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.receiving.deliver import Delivery, Receive
from rmq_pipeline.broker.receiving.reading import delivered, part_of, receipts_of
from rmq_pipeline.broker.settling.each import GiveBack, Renew
from rmq_pipeline.broker.settling.outcomes import RETRY, Outcomes
from rmq_pipeline.broker.settling.settle import Mask, Settle
from rmq_pipeline.errors import CorruptLogError, RocketMQError, StorageError
from rmq_pipeline.failure import Failure
from rmq_pipeline.receipt import Receipts

log = logging.getLogger(__name__)

#: What reading raises where the store is damaged, or lacks something.
UNREADABLE: Final = (CorruptLogError, StorageError, LookupError)


def readable(engine: Engine, delivery: Delivery, *, request: Receive) -> pa.Table:
    """The messages of a delivery as schema.RECEIVED, as far as they can be read.

    Raises:
        OperatorError, LookupError: nothing of it can be given.
    """
    try:
        return delivered(engine, delivery)
    except UNREADABLE:
        return delivered(engine, sorted_out(engine, delivery, request=request))


def sorted_out(engine: Engine, delivery: Delivery, *, request: Receive) -> Delivery:
    """The part of a delivery that can be read; the rest has failed and waits its backoff.

    In a message group nothing is given that lies behind a message that cannot be read, nor in a
    queue where the consumer group is in order by queue.

    Raises:
        OperatorError, LookupError: nothing of it can be given.
    """
    wrong = np.zeros(len(delivery), dtype=np.bool_)
    why: Exception | None = None
    for row in range(len(delivery)):
        try:
            delivered(engine, part_of(delivery, np.arange(len(delivery)) == row))
        except UNREADABLE as error:
            wrong[row], why = True, error
    if why is not None:
        if engine.state.group(request.group).order == "queue":
            wrong = _and_what_is_behind(delivery, wrong)
        engine.submit(Settle(_failed(receipts_of(delivery).take(wrong), why)))
        log.error("%d messages of a receive cannot be read: %s", wrong.sum(), why)
    # Of a message group what lies behind was given back with the one that has failed.
    renewal = Renew(receipts_of(delivery), request.invisible_duration_ms)
    rest = part_of(delivery, engine.submit(renewal))
    if why is not None and not len(rest):
        raise why
    return rest


def give_back(engine: Engine, delivery: Delivery) -> None:
    """What nobody will get after all, as if it had not been leased; what is settled is let be."""
    if not len(delivery):
        return
    try:
        engine.submit(GiveBack(receipts_of(delivery)))
    except RocketMQError as error:  # the store has failed, which is what the caller hears of
        log.warning("a delivery that nobody got ends with its lease: %s", error)


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
