"""Looking up the message ids of repeated messages, for the answer of a send."""

import numpy as np
import pyarrow as pa

from rmq_pipeline.broker.decide.sent import Sent
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.placement import held, locate
from rmq_pipeline.broker.work.sealed import fetch
from rmq_pipeline.message import Int64s
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID


def name_first(engine: Engine, sent: Sent) -> Sent:
    """Return the answer with the ids of the stored messages in place of the repetitions' own."""
    if sent.unnamed is None or sent.later is None:
        return sent
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
    known = held(engine, topic_id=topic_id, queue_id=queue_id, offset=offset)
    places = locate(engine, topic_id=topic_id, queue_id=queue_id, offset=offset, places=known)
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
