"""Placing one due message: the most frequent send, where a row costs as much as a hundred."""

import functools
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.broker.decide.queues import Heads, queues_of, turn
from rmq_pipeline.broker.decide.sent import Sent
from rmq_pipeline.broker.state.placed import Placed
from rmq_pipeline.broker.state.state import TopicState
from rmq_pipeline.tables import nulls

if TYPE_CHECKING:
    from rmq_pipeline.broker.decide.publish import Send


#: Most cached one-row columns: topics, queues and message groups.
_KEPT: Final = 4096
_INT32: Final = pa.int32()
_INT64: Final = pa.int64()
_NO_TIME: Final = nulls(1, _INT64)
_NO_TOPIC: Final = nulls(1, _INT32)


def is_due(send: "Send") -> bool:
    """Return True if the send is one message that must be visible at once."""
    columns = send.columns
    return (
        len(send) == 1
        and columns["delay_level"].null_count == 1
        and columns["deliver_at_ms"].null_count == 1
        and "delivered_at" not in columns
    )


def place_one(
    send: "Send", topic: TopicState, *, now_ms: int, heads: Heads
) -> tuple[list[Placed], Sent]:
    """Place a send for which ``is_due`` is true."""
    topic_id, queue_id = topic.topic.topic_id, _queue(send, topic, heads=heads)
    offset = heads.get((topic_id, queue_id), topic.queues[queue_id].max_offset)
    heads[topic_id, queue_id] = offset + 1
    queue_ids, offsets = np.array([queue_id], np.int32), np.array([offset], np.int64)
    columns, groups = send.columns, send.message_group_hash
    batch = pa.RecordBatch.from_arrays(
        [
            _kept(topic_id, _INT32),
            _kept(queue_id, _INT32),
            _number(offset, _INT64),
            columns["message_id"],
            columns["tag"],
            columns["keys"],
            columns["message_group"],
            _kept(int(groups[0]), _INT64),
            columns["properties"],
            columns["body"],
            columns["born_at_ms"],
            _number(now_ms, _INT64),
            _NO_TIME,
            _NO_TOPIC,
        ],
        schema=schema.MESSAGE,
    )
    placed = Placed(
        topic_id, batch, queue_ids, offsets, groups, send.tag_hash, now_ms, send.identity
    )
    return [placed], Sent(columns["message_id"], queue_ids, offsets, None, send.topic_id)


def _queue(send: "Send", topic: TopicState, *, heads: Heads) -> int:
    chosen = send.group_queue
    if chosen is not None and send.queues != topic.topic.queues:
        chosen = queues_of(topic.topic, send.columns)  # altered since the table was prepared
    if chosen is None or chosen[0] < 0:
        return turn(topic, heads=heads)
    return int(chosen[0])


def _number(value: int, of_type: pa.DataType) -> pa.Array:
    packed = pa.py_buffer(value.to_bytes(of_type.byte_width, "little", signed=True))
    return pa.Array.from_buffers(of_type, 1, [None, packed])


_kept = functools.lru_cache(maxsize=_KEPT)(_number)
