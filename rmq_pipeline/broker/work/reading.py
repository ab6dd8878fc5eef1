"""Reading leased messages: their receipts, parts of a delivery, and its table."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa

from rmq_pipeline import receipt, schema
from rmq_pipeline.broker.decide.deliver import Delivery, receipts_of
from rmq_pipeline.broker.decide.request import CheckFence
from rmq_pipeline.broker.decide.scan import Taken
from rmq_pipeline.broker.decide.settle import Mask
from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.placement import locate
from rmq_pipeline.broker.work.sealed import fetch
from rmq_pipeline.errors import RocketMQError, StorageError
from rmq_pipeline.store.log.commit_log import CommitLog

_Found = TypeVar("_Found")

#: Most times a read is repeated because the log was replaced. Once is enough unless writes keep
#: failing.
_LOGS: Final = 3


def part_of(delivery: Delivery, chosen: Mask) -> Delivery:
    """Return the chosen messages of a delivery, in their order."""
    taken, done = [], 0
    for queue_id, some in delivery.taken:
        rows = chosen[done : done + len(some)]
        done += len(some)
        if rows.any():
            part = Taken(*(getattr(some, field.name)[rows] for field in fields(Taken)))
            taken.append((queue_id, part))
    return replace(delivery, taken=taken)


def delivered(engine: Engine, delivery: Delivery) -> pa.Table:
    """Return the leased messages as schema.RECEIVED."""
    receipts = receipts_of(delivery)
    queue_id, offset = receipts.queue_id, receipts.queue_offset
    attempt = np.concatenate([taken.attempt for _, taken in delivery.taken])
    places = Places(
        np.concatenate([taken.position for _, taken in delivery.taken]),
        np.concatenate([taken.row for _, taken in delivery.taken]),
    )
    places = locate(
        engine, topic_id=delivery.topic_id, queue_id=queue_id, offset=offset, places=places
    )
    handles = receipt.encode(receipts)
    table = fetch(
        engine,
        places,
        columns=schema.READ.names,
        topic_id=delivery.topic_id,
        queue_id=queue_id,
        offset=offset,
    )
    columns = [*table.columns, pa.array(attempt, pa.int32()), handles]
    return pa.Table.from_arrays(columns, schema=schema.RECEIVED)


def whatever_log(engine: Engine, read: Callable[[], _Found]) -> _Found:
    """Return the result of ``read``; repeat it if the log was closed meanwhile.

    The writer closes and reopens the log after any failed write, which breaks concurrent reads.

    Raises:
        StorageError, LookupError: raised by ``read`` for another reason.
    """
    for _ in range(_LOGS):
        before = engine.log
        try:
            return read()
        except (StorageError, LookupError):
            if not has_another_log(engine, before):
                raise
    return read()


def has_another_log(engine: Engine, before: CommitLog) -> bool:
    """Return True if the log was replaced since, or will be after the current failed write."""
    if engine.log is before:
        with suppress(RocketMQError):  # it may fail with the log, after which the log is replaced
            engine.submit(CheckFence())  # it is answered once the log works
    return engine.log is not before
