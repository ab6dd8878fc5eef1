"""Sending: checking messages, choosing their queues, and setting their delivery times."""

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits, schema
from rmq_pipeline.admission import admit
from rmq_pipeline.broker.decide.queues import (
    Heads,
    hashes_and_queues_of,
    queues_of,
    take_offsets,
    turn,
    turns,
)
from rmq_pipeline.broker.decide.request import BULK_ROWS, Decision, Request
from rmq_pipeline.broker.decide.sent import Sent, repeats_of
from rmq_pipeline.broker.state.duplicates import identities
from rmq_pipeline.broker.state.placed import Placed
from rmq_pipeline.broker.state.state import State, TopicState
from rmq_pipeline.errors import DeliveryTimeError, TopicNotFoundError
from rmq_pipeline.message import PRIORITY, Int32s, Int64s, MessageIds, hash64, with_properties
from rmq_pipeline.tables import nulls, numbers
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID, TIMER_QUEUE, Deduplicate, Topic

Mask = npt.NDArray[np.bool_]

#: A send with this many bytes is bulk, with any number of rows.
BULK_BYTES: Final = 128 * 1024
#: Smaller sends are sorted by the writer: that costs less than the checks here.
_SORTED_ROWS: Final = 64
#: Most cached one-row columns: topics, queues and message groups.
_KEPT: Final = 4096
_INT32: Final = pa.int32()
_INT64: Final = pa.int64()
_NO_TIME: Final = nulls(1, _INT64)
_NO_TOPIC: Final = nulls(1, _INT32)
_MESSAGE: Final = tuple(schema.MESSAGE.names)
_COPIED: Final = ("message_id", "tag", "keys", "message_group", "properties", "body", "born_at_ms")


@dataclass(frozen=True, slots=True)
class Order:
    """Sort order of the rows of a send."""

    #: Index of each row in the caller's table.
    given: Int64s
    #: Message ids in the caller's order.
    message_id: pa.Array


@dataclass(frozen=True, slots=True)
class Send(Request):
    """Checked messages that can be placed; ``columns`` are those of schema.SEND.

    Copies into a dead letter topic are not checked: their originals were.
    """

    uses_reserve: ClassVar[bool] = False

    topic: str
    topic_id: int
    queues: int
    columns: dict[str, pa.Array]
    message_group_hash: Int64s
    tag_hash: Int64s
    group_queue: Int32s | None
    delay_max_ms: int
    #: Delays from level 1 on; a level above the last counts as the last.
    delay_levels_ms: tuple[int, ...] = limits.DELAY_LEVELS_MS
    #: Property that makes two messages repetitions, and its hash for each message.
    deduplicate: Deduplicate = "none"
    identity: Int64s | None = None
    #: Sort order of the rows; None: as given.
    order: Order | None = None

    def identified(self, deduplicate: Deduplicate) -> "Send":
        """Return the send with the identities that its topic compares."""
        if deduplicate == self.deduplicate or "delivered_at" in self.columns:
            return self
        ids, keys = self.columns["message_id"], self.columns["keys"]
        return replace(
            self, deduplicate=deduplicate, identity=identities(deduplicate, ids, keys=keys)
        )

    def __len__(self) -> int:
        return len(self.tag_hash)

    def is_bulk(self) -> bool:
        """Return True if the send takes longer than waking the caller's thread, or a sync."""
        # nbytes takes several times as long. A checked column has hardly more bytes than its rows.
        size = self.columns["body"].get_total_buffer_size()
        return len(self) >= BULK_ROWS or size >= BULK_BYTES

    def decide(self, state: State, now_ms: int) -> Decision:
        """Place the messages; the answer is a Sent, whose ``table`` is schema.SENT."""
        placed, sent = place(self, state, now_ms=now_ms, heads={})
        return Decision(answer=sent, placed=placed)


def prepare(
    topic: Topic,
    columns: dict[str, pa.Array],
    *,
    ids: MessageIds,
    delay_max_ms: int,
    now_ms: int,
    delay_levels_ms: tuple[int, ...] = limits.DELAY_LEVELS_MS,
) -> Send:
    """Check columns of schema.SEND against a topic; accept or refuse them as a whole.

    Args:
        columns: contiguous; the send takes over the dict.

    Raises:
        RequestError: names the row and its fault.
    """
    admit(topic, columns)
    if topic.type == "lite":
        columns["message_group"] = columns["lite_topic"]
    if topic.type == "priority":
        columns["properties"] = with_properties(
            columns["properties"], {PRIORITY: columns["priority"].cast(pa.string())}
        )
    send = checked(
        topic,
        columns,
        ids=ids,
        delay_max_ms=delay_max_ms,
        now_ms=now_ms,
        delay_levels_ms=delay_levels_ms,
    )
    return in_order(send)


def checked(
    topic: Topic,
    columns: dict[str, pa.Array],
    *,
    ids: MessageIds,
    delay_max_ms: int,
    now_ms: int,
    delay_levels_ms: tuple[int, ...] = limits.DELAY_LEVELS_MS,
) -> Send:
    """Return a Send of checked columns; missing message ids and birth times are filled in."""
    n = len(columns["body"])
    given = columns["message_id"]
    if given.null_count == n:
        columns["message_id"] = ids.take(n)
    elif given.null_count:
        columns["message_id"] = pc.coalesce(given, ids.take(n))
    born = columns["born_at_ms"]
    if born.null_count == n:
        columns["born_at_ms"] = pa.array(np.full(n, now_ms, dtype=np.int64))
    elif born.null_count:
        columns["born_at_ms"] = pc.fill_null(born, now_ms)
    group_hash, group_queue = hashes_and_queues_of(topic, columns)
    return Send(
        topic=topic.name,
        topic_id=topic.topic_id,
        queues=topic.queues,
        columns=columns,
        message_group_hash=group_hash,
        tag_hash=hash64(columns["tag"]),
        group_queue=group_queue,
        delay_max_ms=delay_max_ms,
        delay_levels_ms=delay_levels_ms,
    ).identified(topic.deduplicate)


def subset(send: Send, rows: Int64s) -> Send:
    """Return a send with only these rows."""
    at, n = numbers(rows), len(rows)
    return replace(
        send,
        columns={name: _chosen(column, at, n=n) for name, column in send.columns.items()},
        message_group_hash=send.message_group_hash[rows],
        tag_hash=send.tag_hash[rows],
        group_queue=None if send.group_queue is None else send.group_queue[rows],
        identity=None if send.identity is None else send.identity[rows],
    )


def in_order(send: Send) -> Send:
    """Return the send sorted by queue, if its queues are known already.

    Reading adjacent messages takes a slice instead of a copy. The caller's thread sorts messages
    with groups before the writer decides. The answer is in the caller's order.
    """
    queues = send.group_queue
    if (
        queues is None
        or len(queues) < _SORTED_ROWS
        or send.deduplicate != "none"
        or not _is_due(send)
        or queues.min() < 0  # the queue in turn is not known yet
    ):
        return send
    if np.all(queues[1:] >= queues[:-1]):
        return replace(send, order=Order(np.arange(len(queues)), send.columns["message_id"]))
    # NumPy sorts int16 several times faster (radix sort); there are fewer queues than 32,768.
    given = np.argsort(queues.astype(np.int16), kind="stable")
    order = Order(given, send.columns["message_id"])
    return replace(subset(send, given), order=order)


def as_given(send: Send) -> Send:
    """Return the send with its rows in the caller's order."""
    if send.order is None:
        return send
    back = np.empty_like(send.order.given)
    back[send.order.given] = np.arange(len(back))
    return replace(subset(send, back), order=None)


def place(send: Send, state: State, *, now_ms: int, heads: Heads) -> tuple[list[Placed], Sent]:
    """Place a send in queues. ``heads`` carries offsets over to the next send of a decision.

    Raises:
        TopicNotFoundError: the topic was deleted meanwhile.
        DeliveryTimeError: a time is further ahead than the broker allows.
    """
    topic = state.topics.get(send.topic_id)
    if topic is None:
        raise TopicNotFoundError(f"There is no topic {send.topic}.")
    known = state.duplicates.of(send.topic_id)
    if known is None or "delivered_at" in send.columns:
        return _place_all(send, state, topic=topic, now_ms=now_ms, heads=heads)
    send = as_given(send).identified(known.deduplicate)
    assert send.identity is not None
    repeats = repeats_of(known, send.identity, now_ms=now_ms)
    if repeats is None:
        return _place_all(send, state, topic=topic, now_ms=now_ms, heads=heads)
    new = subset(send, np.flatnonzero(~repeats.all()))
    placed, sent = _place_all(new, state, topic=topic, now_ms=now_ms, heads=heads)
    return placed, repeats.completed(sent, message_id=send.columns["message_id"])


def _place_all(
    send: Send, state: State, *, topic: TopicState, now_ms: int, heads: Heads
) -> tuple[list[Placed], Sent]:
    n = len(send)
    if n == 1 and _is_due(send):
        return _place_one(send, topic, now_ms=now_ms, heads=heads)
    if n == 0:
        empty = np.zeros(0, np.int64)
        return [], Sent(
            send.columns["message_id"], empty.astype(np.int32), empty, None, send.topic_id
        )
    sorted_or_free = (
        send.queues == topic.topic.queues
        if send.order is not None
        else send.group_queue is None and _is_due(send)
    )
    if sorted_or_free:
        return _place_in_order(send, topic, now_ms=now_ms, heads=heads)
    send = as_given(send)
    deliver_at, later = _delivery_times(send, now_ms, ahead_ms=state.ahead_ms)
    queue_id = np.zeros(n, dtype=np.int32)
    offsets = np.zeros(n, dtype=np.int64)
    placed = []
    for part, scheduled in _in_time(later):
        to = state.topics[SCHEDULE_TOPIC_ID] if scheduled else topic
        rows, chosen = (
            (part, _schedule_queues(send, part))
            if scheduled
            else (part, _queues(send, topic, rows=part, heads=heads))
        )
        if send.group_queue is not None and len(rows) > 1:
            # Rows of a queue are adjacent, so that reading them takes a slice instead of a copy.
            order = np.argsort(chosen, kind="stable")
            rows, chosen = rows[order], chosen[order]
        queue_id[rows] = chosen
        offsets[rows] = take_offsets(to, chosen, heads=heads)
        target = send.topic_id if scheduled else None
        at = deliver_at if scheduled or "delivered_at" in send.columns else None
        placed.append(
            _placed(
                send,
                rows,
                topic_id=to.topic.topic_id,
                queue_id=chosen,
                offsets=offsets[rows],
                now_ms=now_ms,
                deliver_at=at,
                target=target,
            )
        )
    return placed, Sent(send.columns["message_id"], queue_id, offsets, later, send.topic_id)


def _is_due(send: Send) -> bool:
    """Return True if all messages must be visible at once."""
    columns, n = send.columns, len(send)
    return (
        "delivered_at" not in columns
        and columns["delay_level"].null_count == n
        and columns["deliver_at_ms"].null_count == n
    )


def _place_one(
    send: Send, topic: TopicState, *, now_ms: int, heads: Heads
) -> tuple[list[Placed], Sent]:
    """Place one due message: the most frequent send, where a row costs as much as a hundred."""
    topic_id, chosen = topic.topic.topic_id, send.group_queue
    if chosen is not None and send.queues != topic.topic.queues:
        chosen = queues_of(topic.topic, send.columns)  # altered since the table was prepared
    queue_id = turn(topic, heads=heads) if chosen is None or chosen[0] < 0 else int(chosen[0])
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


def _number(value: int, of_type: pa.DataType) -> pa.Array:
    packed = pa.py_buffer(value.to_bytes(of_type.byte_width, "little", signed=True))
    return pa.Array.from_buffers(of_type, 1, [None, packed])


_kept = functools.lru_cache(maxsize=_KEPT)(_number)


def _place_in_order(
    send: Send, topic: TopicState, *, now_ms: int, heads: Heads
) -> tuple[list[Placed], Sent]:
    """Place due messages that are sorted by queue, or that may go to any queue."""
    n, queue_id = len(send), send.group_queue
    if queue_id is None:
        queue_id = turns(topic, n, heads=heads)
    offsets = take_offsets(topic, queue_id, heads=heads)
    placed = _placed(
        send,
        np.arange(n),
        topic_id=topic.topic.topic_id,
        queue_id=queue_id,
        offsets=offsets,
        now_ms=now_ms,
        deliver_at=None,
        target=None,
    )
    if send.order is None:
        return [placed], Sent(send.columns["message_id"], queue_id, offsets, None, send.topic_id)
    queues, places = np.empty_like(queue_id), np.empty_like(offsets)
    queues[send.order.given] = queue_id
    places[send.order.given] = offsets
    return [placed], Sent(send.order.message_id, queues, places, None, send.topic_id)


def _delivery_times(send: Send, now_ms: int, *, ahead_ms: int) -> tuple[Int64s, Mask]:
    """Return the delivery time of each message, and a mask of those not due yet."""
    level, at = send.columns["delay_level"], send.columns["deliver_at_ms"]
    n = len(send)
    if level.null_count == n and at.null_count == n:
        return np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.bool_)
    levels = _levels(send)
    delays = np.array([0, *send.delay_levels_ms], dtype=np.int64)
    times = pc.fill_null(at, 0).to_numpy()
    due: Int64s = np.where(levels > 0, now_ms + delays[levels], times)
    if due.max() - now_ms > send.delay_max_ms:
        row = int(np.argmax(due - now_ms > send.delay_max_ms))
        raise DeliveryTimeError(
            f"Row {row}: the delivery time is over {send.delay_max_ms} ms ahead.",
            remedy=f"Use a time at most {send.delay_max_ms} ms ahead, or raise delay_max_ms.",
        )
    # A level counts from the broker's clock; a time is given by the wall clock.
    return due, due > np.where(levels > 0, now_ms, now_ms - ahead_ms)


def _levels(send: Send) -> Int32s:
    """Return the delay level of each message; 0 for none."""
    levels: Int32s = pc.fill_null(send.columns["delay_level"], 0).to_numpy()
    return np.minimum(levels, len(send.delay_levels_ms))


def _in_time(later: Mask) -> list[tuple[Int64s, bool]]:
    """Return the rows due now and the rows due later; skip an empty part."""
    if not later.any():
        return [(np.arange(len(later)), False)]
    parts = [(np.flatnonzero(~later), False), (np.flatnonzero(later), True)]
    return [(rows, scheduled) for rows, scheduled in parts if len(rows)]


def _queues(send: Send, topic: TopicState, *, rows: Int64s, heads: Heads) -> Int32s:
    chosen = send.group_queue
    if chosen is not None:
        if send.queues != topic.topic.queues:  # altered since the table was prepared
            chosen = queues_of(topic.topic, send.columns)
            if chosen is None:  # all messages with a chosen queue were repetitions
                return turns(topic, len(rows), heads=heads)
        chosen = chosen[rows]
        free = np.flatnonzero(chosen < 0)
        if len(free):
            chosen[free] = turns(topic, len(free), heads=heads)
        return chosen
    return turns(topic, len(rows), heads=heads)


def _schedule_queues(send: Send, rows: Int64s) -> Int32s:
    levels = _levels(send)[rows]
    # The queue of messages with a time comes after those of RocketMQ's levels.
    beyond = levels > TIMER_QUEUE
    return np.where(levels > 0, levels - 1 + beyond, TIMER_QUEUE).astype(np.int32)


def _placed(
    send: Send,
    rows: Int64s,
    *,
    topic_id: int,
    queue_id: Int32s,
    offsets: Int64s,
    now_ms: int,
    deliver_at: Int64s | None,
    target: int | None,
) -> Placed:
    n = len(rows)
    whole = n == len(send) and bool(np.all(rows[1:] > rows[:-1]))
    at = None if whole else pa.array(rows)
    columns = {name: _chosen(send.columns[name], at, n=n) for name in _COPIED}
    groups = send.message_group_hash if whole else send.message_group_hash[rows]
    made: dict[str, Any] = {
        "topic_id": numbers(np.full(n, topic_id, dtype=np.int32)),
        "queue_id": numbers(queue_id),
        "queue_offset": numbers(offsets),
        "message_group_hash": numbers(groups),
        "stored_at_ms": numbers(np.full(n, now_ms, dtype=np.int64)),
        "deliver_at_ms": _times(send, rows, deliver_at=deliver_at),
        "target_topic_id": nulls(n, pa.int32())
        if target is None
        else pa.array(np.full(n, target, dtype=np.int32)),
    }
    batch = pa.RecordBatch.from_arrays(
        [columns[name] if name in columns else made[name] for name in _MESSAGE],
        schema=schema.MESSAGE,
    )
    tags = send.tag_hash if whole else send.tag_hash[rows]
    identity = None if send.identity is None else send.identity[rows]
    return Placed(topic_id, batch, queue_id, offsets, groups, tags, now_ms, identity)


def _chosen(column: pa.Array, at: pa.Array | None, *, n: int) -> pa.Array:
    """Return the ``n`` rows ``at``; None: all."""
    if at is None:
        return column
    return column.slice(0, n) if column.null_count == len(column) else column.take(at)


def _times(send: Send, rows: Int64s, *, deliver_at: Int64s | None) -> pa.Array:
    given = send.columns.get("delivered_at")
    if given is not None:
        return given.take(pa.array(rows))
    if deliver_at is None:
        return nulls(len(rows), pa.int64())
    return numbers(deliver_at[rows])
