"""Recalling scheduled messages before their delivery."""

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline import receipt, schema
from rmq_pipeline.broker.decide.schedule import FindScheduled, Recall, refuse_recall
from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.state.schedule import Scheduled, keys_of
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.sealed import fetch
from rmq_pipeline.message import Int64s, hash64
from rmq_pipeline.tables import columns_of
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID

_FOREIGN: Final = "Use the recall_handle of a send to this topic, at this broker."


def recall(engine: Engine, topic: str, *, handles: pa.Table) -> pa.Table:
    """Recall scheduled messages of a topic, all of them or none.

    Returns:
        schema.RECALLED, in the order of the handles.

    Raises:
        RecallError: a message was delivered or recalled before, is of another topic, or is unknown.
    """
    texts = columns_of(handles, schema.RECALL)["recall_handle"]
    wanted = receipt.decode_recall(texts)
    topic_id = engine.state.topic(topic).topic.topic_id
    if not len(wanted):
        return schema.RECALLED.empty_table()
    refuse_recall(wanted.topic_id != topic_id, what=f"it is not of topic {topic}", remedy=_FOREIGN)
    keys = keys_of(wanted.queue_id, wanted.queue_offset)
    refuse_recall(_repeated(keys), what="it is given twice", remedy="Give each handle once.")
    found: tuple[Scheduled, npt.NDArray[np.bool_]] = engine.submit(FindScheduled(keys))
    rows, still = found
    refuse_recall(~still)
    ids = fetch(
        engine,
        Places(rows.position, rows.row),
        columns=("message_id",),
        topic_id=SCHEDULE_TOPIC_ID,
        queue_id=rows.queue_id,
        offset=rows.queue_offset,
    ).column("message_id")
    message_id = pa.concat_arrays(ids.chunks)
    other = hash64(message_id) != wanted.message_id_hash
    refuse_recall(
        other | (rows.target_topic_id != topic_id),
        what="no such message is scheduled",
        remedy=_FOREIGN,
    )
    engine.submit(Recall(rows))
    return pa.Table.from_arrays([texts, message_id], schema=schema.RECALLED)


def _repeated(keys: Int64s) -> npt.NDArray[np.bool_]:
    repeated = np.ones(len(keys), dtype=np.bool_)
    repeated[np.unique(keys, return_index=True)[1]] = False
    return repeated
