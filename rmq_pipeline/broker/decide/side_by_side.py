"""Placing many due messages so that the messages of a queue are adjacent.

Reading adjacent messages takes a slice instead of a copy. The caller's thread sorts messages with
groups before the writer decides. The answer is in the caller's order.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.broker.decide.queues import Heads, turns
from rmq_pipeline.broker.decide.sent import Sent
from rmq_pipeline.broker.state.event_rows import run_starts
from rmq_pipeline.broker.state.placed import Placed
from rmq_pipeline.broker.state.state import TopicState
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.tables import nulls, numbers

if TYPE_CHECKING:
    from rmq_pipeline.broker.decide.publish import Send


#: Smaller sends are sorted by the writer: that costs less than the checks here.
_LEAST_ROWS: Final = 64
_NO_TIMES: Final = ("delay_level", "deliver_at_ms")
_COPIED: Final = ("message_id", "tag", "keys", "message_group", "properties", "body", "born_at_ms")
_NAMES: Final = tuple(schema.MESSAGE.names)


@dataclass(frozen=True, slots=True)
class Order:
    """Sort order of the rows of a send."""

    #: Index of each row in the caller's table.
    given: Int64s
    #: Message ids in the caller's order.
    message_id: pa.Array


def in_order(send: "Send") -> "Send":
    """Return the send sorted by queue, if its queues are known already."""
    queues = send.group_queue
    if (
        queues is None
        or len(queues) < _LEAST_ROWS
        or send.deduplicate != "none"
        or not is_due(send)
        or queues.min() < 0  # the queue in turn is not known yet
    ):
        return send
    if np.all(queues[1:] >= queues[:-1]):
        return replace(send, order=Order(np.arange(len(queues)), send.columns["message_id"]))
    # NumPy sorts int16 several times faster (radix sort); there are fewer queues than 32,768.
    given = np.argsort(queues.astype(np.int16), kind="stable")
    order = Order(given, send.columns["message_id"])
    return replace(_taken(send, given), order=order)


def as_given(send: "Send") -> "Send":
    """Return the send with its rows in the caller's order."""
    if send.order is None:
        return send
    back = np.empty_like(send.order.given)
    back[send.order.given] = np.arange(len(back))
    return replace(_taken(send, back), order=None)


def _taken(send: "Send", rows: Int64s) -> "Send":
    at, n = numbers(rows), len(rows)
    return replace(
        send,
        columns={
            name: column if column.null_count == n else column.take(at)
            for name, column in send.columns.items()
        },
        message_group_hash=send.message_group_hash[rows],
        tag_hash=send.tag_hash[rows],
        group_queue=None if send.group_queue is None else send.group_queue[rows],
        identity=None if send.identity is None else send.identity[rows],
    )


def is_due(send: "Send") -> bool:
    """Return True if all messages must be visible at once."""
    columns, n = send.columns, len(send)
    return "delivered_at" not in columns and all(
        columns[name].null_count == n for name in _NO_TIMES
    )


def can_place(send: "Send", topic: TopicState) -> bool:
    """Return True if ``place_in_order`` can place the send: due, and sorted or without queues."""
    if send.order is None:
        return send.group_queue is None and is_due(send)
    return send.queues == topic.topic.queues


def place_in_order(
    send: "Send", topic: TopicState, *, now_ms: int, heads: Heads
) -> tuple[list[Placed], Sent]:
    """Place a send for which ``can_place`` is true."""
    n, queue_id = len(send), send.group_queue
    if queue_id is None:
        queue_id = turns(topic, n, heads=heads)
    offsets = _offsets(topic, queue_id, heads=heads)
    batch = _batch(send, topic.topic.topic_id, queue_id=queue_id, offsets=offsets, now_ms=now_ms)
    placed = Placed(
        topic.topic.topic_id,
        batch,
        queue_id,
        offsets,
        send.message_group_hash,
        send.tag_hash,
        now_ms,
        send.identity,
    )
    return [placed], _sent(send, queue_id, offsets=offsets)


def _offsets(topic: TopicState, queue_id: Int32s, *, heads: Heads) -> Int64s:
    """Return the next offsets of queues whose rows are adjacent."""
    n = len(queue_id)
    starts = run_starts(queue_id)
    counts = np.diff(starts, append=n)
    firsts = []
    for queue, count in zip(queue_id[starts].tolist(), counts.tolist(), strict=True):
        key = (topic.topic.topic_id, queue)
        head = heads.get(key, topic.queues[queue].max_offset)
        heads[key] = head + count
        firsts.append(head)
    offsets = np.arange(n)
    offsets += np.repeat(np.array(firsts, dtype=np.int64) - starts, counts)
    return offsets


def _batch(
    send: "Send", topic_id: int, *, queue_id: Int32s, offsets: Int64s, now_ms: int
) -> pa.RecordBatch:
    n = len(queue_id)
    made: dict[str, Any] = {name: send.columns[name] for name in _COPIED}
    made["topic_id"] = numbers(np.full(n, topic_id, dtype=np.int32))
    made["queue_id"] = numbers(queue_id)
    made["queue_offset"] = numbers(offsets)
    made["message_group_hash"] = numbers(send.message_group_hash)
    made["stored_at_ms"] = numbers(np.full(n, now_ms, dtype=np.int64))
    made["deliver_at_ms"] = nulls(n, pa.int64())
    made["target_topic_id"] = nulls(n, pa.int32())
    return pa.RecordBatch.from_arrays([made[name] for name in _NAMES], schema=schema.MESSAGE)


def _sent(send: "Send", queue_id: Int32s, *, offsets: Int64s) -> Sent:
    if send.order is None:
        return Sent(send.columns["message_id"], queue_id, offsets, None, send.topic_id)
    queues, places = np.empty_like(queue_id), np.empty_like(offsets)
    queues[send.order.given] = queue_id
    places[send.order.given] = offsets
    return Sent(send.order.message_id, queues, places, None, send.topic_id)
