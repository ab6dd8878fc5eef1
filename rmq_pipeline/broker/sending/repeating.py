"""The ids of messages that others repeat, for the answer to those."""

import numpy as np
import pyarrow as pa

from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.sending.sent import Sent
from rmq_pipeline.broker.stored.bodies import Places
from rmq_pipeline.broker.stored.placement import locate
from rmq_pipeline.broker.stored.sealed import fetch
from rmq_pipeline.message import Int64s
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID


def name_first(engine: Engine, sent: Sent) -> Sent:
    """The answer with the ids of the messages that are repeated, where those have others."""
    if sent.unnamed is None or sent.later is None:
        return sent
    engine.dispatched()
    rows = np.flatnonzero(sent.unnamed)
    ids = np.empty(len(rows), dtype=object)
    for topic_id, scheduled in ((sent.topic_id, False), (SCHEDULE_TOPIC_ID, True)):
        here = np.flatnonzero(sent.later[rows] == scheduled)
        if len(here):
            at = rows[here]
            ids[here] = _ids_at(engine, topic_id, sent=sent, rows=at)
    return sent.named(pa.array(ids, pa.string()))


def _ids_at(engine: Engine, topic_id: int, *, sent: Sent, rows: Int64s) -> list[str]:
    queue_id, offset = sent.queue_id[rows], sent.queue_offset[rows]
    unknown = Places(np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.int32))
    places = locate(engine, topic_id=topic_id, queue_id=queue_id, offset=offset, places=unknown)
    found = fetch(
        engine,
        places,
        columns=("message_id",),
        topic_id=topic_id,
        queue_id=queue_id,
        offset=offset,
    )
    ids: list[str] = found.column("message_id").to_pylist()
    return ids
