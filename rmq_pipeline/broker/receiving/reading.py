"""What a receive leased, read: its receipts, a part of it, its messages."""

from dataclasses import fields, replace

import numpy as np
import pyarrow as pa

from rmq_pipeline import receipt, schema
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.receiving.deliver import Delivery
from rmq_pipeline.broker.receiving.scan import Taken
from rmq_pipeline.broker.settling.settle import Mask
from rmq_pipeline.broker.stored.bodies import Places
from rmq_pipeline.broker.stored.placement import locate
from rmq_pipeline.broker.stored.sealed import fetch
from rmq_pipeline.receipt import Receipts


def receipts_of(delivery: Delivery) -> Receipts:
    """The receipts of what was leased, in the order in which it is delivered."""
    n = len(delivery)
    queue_id = [np.full(len(taken), q, dtype=np.int32) for q, taken in delivery.taken]
    return Receipts(
        np.full(n, delivery.group_id, dtype=np.int32),
        np.full(n, delivery.topic_id, dtype=np.int32),
        np.concatenate(queue_id),
        np.concatenate([taken.offset for _, taken in delivery.taken]),
        np.full(n, delivery.delivery, dtype=np.int64),
    )


def part_of(delivery: Delivery, chosen: Mask) -> Delivery:
    """Some of the messages of a delivery, in their order."""
    taken, done = [], 0
    for queue_id, some in delivery.taken:
        rows = chosen[done : done + len(some)]
        done += len(some)
        if rows.any():
            part = Taken(*(getattr(some, field.name)[rows] for field in fields(Taken)))
            taken.append((queue_id, part))
    return replace(delivery, taken=taken)


def delivered(engine: Engine, delivery: Delivery) -> pa.Table:
    """The messages that were leased, as schema.RECEIVED."""
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
