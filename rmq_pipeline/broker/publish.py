"""Sending: what a topic takes, which queue each message goes to, and when it becomes visible."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits, schema
from rmq_pipeline.broker.placed import Placed
from rmq_pipeline.broker.state import State, TopicState
from rmq_pipeline.broker.tables import columns_of
from rmq_pipeline.broker.writer import Decision
from rmq_pipeline.errors import (
    DeliveryTimeError,
    IllegalMessageGroupError,
    IllegalMessageIdError,
    IllegalMessageKeyError,
    IllegalMessagePropertyError,
    IllegalMessageTagError,
    IllegalTopicError,
    MessageBodyEmptyError,
    MessageBodyTooLargeError,
    MessagePropertiesTooLargeError,
    MessageTypeError,
    RocketMQError,
    TopicNotFoundError,
)
from rmq_pipeline.message import Int32s, Int64s, MessageIds, hash64, queue_of_groups
from rmq_pipeline.topic import DLQ_PREFIX, SCHEDULE_TOPIC_ID, TIMER_QUEUE, Topic, is_system

_CONTROL: Final = r"[\x00-\x1f\x7f]"
_LEVELS: Final = np.array([0, *limits.DELAY_LEVELS_MS], dtype=np.int64)
Mask = npt.NDArray[np.bool_]
#: Property names that the system gives a meaning (semantics §1.3).
_RESERVED: Final = pa.array(
    """
    KEYS TAGS WAIT DELAY RETRY_TOPIC REAL_TOPIC REAL_QID TRAN_MSG PGROUP MIN_OFFSET MAX_OFFSET
    ORIGIN_MESSAGE_ID RECONSUME_TIME MAX_RECONSUME_TIMES MSG_REGION TRACE_ON UNIQ_KEY
    EXTEND_UNIQ_INFO CONSUME_START_TIME INNER_NUM INNER_BASE DUP_INFO
    CHECK_IMMUNITY_TIME_IN_SECONDS TRAN_PREPARED_QUEUE_OFFSET __transactionId__
    TRANSACTION_CHECK_TIMES INSTANCE_ID CORRELATION_ID REPLY_TO_CLIENT TTL ARRIVE_TIME
    PUSH_REPLY_TIME MSG_TYPE CLUSTER POP_CK POP_CK_OFFSET 1ST_POP_TIME __SHARDINGKEY
    INNER_MULTI_DISPATCH INNER_MULTI_QUEUE_OFFSET TRACE_CONTEXT TIMER_DELAY_SEC TIMER_DELAY_MS
    TIMER_DELIVER_MS TIMER_OUT_MS TIMER_ENQUEUE_MS TIMER_DEQUEUE_MS TIMER_ROLL_TIMES
    TIMER_DEL_UNIQKEY TIMER_DELAY_LEVEL __BORNHOST BORN_TIMESTAMP DLQ_ORIGIN_TOPIC
    DLQ_ORIGIN_MESSAGE_ID __CRC32#
    """.split()
)


def _refuse(bad: pa.Array, error: type[RocketMQError], what: str) -> None:
    """Raise when any row is bad, naming the first."""
    if pc.any(bad).as_py():
        row = pc.index(bad, True).as_py()
        raise error(f"Row {row}: {what}.")


def _has_control(texts: pa.Array) -> pa.Array:
    return pc.match_substring_regex(texts, _CONTROL)


def _blank(texts: pa.Array) -> pa.Array:
    return pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(texts)), 0)


def _check_body(body: pa.Array) -> None:
    _refuse(pc.is_null(body), MessageBodyEmptyError, "the body is null")
    lengths = pc.binary_length(body)
    bounds = pc.min_max(lengths).as_py()
    if bounds["min"] == 0:
        _refuse(pc.equal(lengths, 0), MessageBodyEmptyError, "the body is empty")
    if bounds["max"] > limits.BODY_BYTES:
        _refuse(pc.greater(lengths, limits.BODY_BYTES), MessageBodyTooLargeError, "over 4 MiB")


def _check_texts(columns: dict[str, pa.Array]) -> None:
    tag, ids, keys = columns["tag"], columns["message_id"], columns["keys"]
    if tag.null_count < len(tag):
        wrong = pc.or_(_blank(tag), pc.or_(pc.match_substring(tag, "|"), _has_control(tag)))
        _refuse(wrong, IllegalMessageTagError, "the tag is blank or holds | or a control character")
    if ids.null_count < len(ids):
        _refuse(_blank(ids), IllegalMessageIdError, "the message id is blank")
    if keys.null_count < len(keys):
        flat = keys.flatten()
        if len(flat):
            wrong = pc.or_(_blank(flat), _has_control(flat))
            wrong = pc.or_(pc.fill_null(wrong, True), pc.fill_null(pc.match_substring(flat, " "), True))
            if pc.any(wrong).as_py():
                row = pc.list_parent_indices(keys)[pc.index(wrong, True).as_py()].as_py()
                raise IllegalMessageKeyError(f"Row {row}: a key is blank or has a space in it.")


def _check_properties(columns: dict[str, pa.Array]) -> None:
    properties = columns["properties"]
    n = len(properties)
    sizes = np.zeros(n, dtype=np.int64)
    if columns["tag"].null_count < n:
        sizes += pc.fill_null(pc.binary_length(columns["tag"]), 0).to_numpy()
    lists = [columns["keys"]] if columns["keys"].null_count < n else []
    if properties.null_count < n:
        names = properties.keys
        counts = np.diff(properties.offsets.to_numpy())
        if len(names):
            wrong = pc.or_(_blank(names), _has_control(names))
            _refuse_in_list(wrong, properties, "a property name is blank or has a control character")
            _refuse_in_list(
                pc.is_in(names, value_set=_RESERVED), properties, "a property name is reserved"
            )
            values = pc.fill_null(_has_control(properties.items), False)
            _refuse_in_list(values, properties, "a property value has a control character")
        if counts.size and counts.max() > limits.PROPERTY_COUNT:
            raise MessagePropertiesTooLargeError(
                f"Row {int(np.argmax(counts > limits.PROPERTY_COUNT))}: over 128 properties."
            )
        for texts in (names, properties.items):
            sizes += _list_bytes(properties.offsets, texts)
    for column in lists:
        sizes += _list_bytes(column.offsets, column.flatten())
    if sizes.size and sizes.max() > limits.PROPERTY_BYTES:
        row = int(np.argmax(sizes > limits.PROPERTY_BYTES))
        raise MessagePropertiesTooLargeError(f"Row {row}: {sizes[row]} bytes of properties.")


def _refuse_in_list(bad: pa.Array, lists: pa.Array, what: str) -> None:
    if pc.any(bad).as_py():
        at = pc.index(bad, True).as_py() + lists.offsets[0].as_py()
        row = int(np.searchsorted(lists.offsets.to_numpy(), at, side="right")) - 1
        raise IllegalMessagePropertyError(f"Row {row}: {what}.")


def _list_bytes(offsets: pa.Array, texts: pa.Array) -> Int64s:
    """Bytes of the texts of each list."""
    bounds = offsets.to_numpy().astype(np.int64)
    lengths = pc.fill_null(pc.binary_length(texts), 0).to_numpy() if len(texts) else np.zeros(0)
    sums = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    spread: Int64s = np.diff(sums[bounds - bounds[0]])
    return spread


def _check_groups(topic: Topic, groups: pa.Array) -> None:
    if topic.type != "fifo":
        if groups.null_count < len(groups):
            _refuse(
                pc.is_valid(groups),
                MessageTypeError,
                f"it has a message_group, and topic {topic.name} is {topic.type}",
            )
        return
    if groups.null_count:
        _refuse(pc.is_null(groups), IllegalMessageGroupError, "a fifo message needs a message_group")
    lengths = pc.binary_length(groups)
    _refuse(
        pc.or_(_blank(groups), pc.greater(lengths, limits.MESSAGE_GROUP_BYTES)),
        IllegalMessageGroupError,
        "the message_group is blank or over 63 bytes",
    )
    _refuse(_has_control(groups), IllegalMessageGroupError, "a control character in message_group")


def _check_delay(topic: Topic, columns: dict[str, pa.Array]) -> None:
    level, at = columns["delay_level"], columns["deliver_at_ms"]
    given = pc.or_(pc.is_valid(level), pc.is_valid(at))
    if topic.type == "delay":
        _refuse(
            pc.invert(given),
            MessageTypeError,
            f"it has no delay_level or deliver_at_ms, and topic {topic.name} is delay",
        )
        if level.null_count < len(level):
            wrong = pc.or_(pc.less(level, 1), pc.greater(level, len(limits.DELAY_LEVELS_MS)))
            _refuse(wrong, DeliveryTimeError, "the delay level is not 1 to 18")
    elif level.null_count < len(level) or at.null_count < len(at):
        _refuse(
            given, MessageTypeError, f"it is delayed, and topic {topic.name} is {topic.type}"
        )


@dataclass(frozen=True, slots=True)
class Send:
    """Messages that were checked and may be placed; ``columns`` are those of schema.SEND.

    A copy into a dead letter topic is checked by nobody: what it copies was.
    """

    topic: str
    topic_id: int
    queues: int
    columns: dict[str, pa.Array]
    message_group_hash: Int64s
    tag_hash: Int64s
    group_queue: Int32s | None
    delay_max_ms: int
    uses_reserve: bool = False

    def __len__(self) -> int:
        return len(self.tag_hash)

    def decide(self, state: State, now_ms: int) -> Decision:
        """Place the messages; the answer is a function that makes the table schema.SENT."""
        placed, sent = place(self, state, now_ms, {})
        return Decision(answer=sent, placed=placed)


def prepare(topic: Topic, messages: pa.Table, ids: MessageIds, *, delay_max_ms: int, now_ms: int) -> Send:
    """Check a table of schema.SEND against a topic, whole or not at all.

    Raises:
        RequestError: the row and what is wrong with it.
    """
    if is_system(topic.name) or topic.name.startswith(DLQ_PREFIX):
        raise IllegalTopicError(f"Topic {topic.name} takes no messages from clients.")
    columns = columns_of(messages, schema.SEND)
    n = messages.num_rows
    if n > limits.BATCH_ROWS or messages.nbytes > limits.BATCH_BYTES:
        raise MessageBodyTooLargeError(f"A batch of {n} rows and {messages.nbytes} bytes.")
    if n:
        _check_body(columns["body"])
        _check_texts(columns)
        _check_groups(topic, columns["message_group"])
        _check_delay(topic, columns)
        _check_properties(columns)
    return checked(topic, columns, ids, delay_max_ms=delay_max_ms, now_ms=now_ms)


def checked(
    topic: Topic, columns: dict[str, pa.Array], ids: MessageIds, *, delay_max_ms: int, now_ms: int
) -> Send:
    """A Send of columns that need no check; missing ids and times of birth are filled in."""
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
    groups = columns["message_group"]
    return Send(
        topic=topic.name,
        topic_id=topic.topic_id,
        queues=topic.queues,
        columns=columns,
        message_group_hash=hash64(groups),
        tag_hash=hash64(columns["tag"]),
        group_queue=queue_of_groups(groups, topic.queues) if topic.type == "fifo" and n else None,
        delay_max_ms=delay_max_ms,
    )


@dataclass(frozen=True, slots=True)
class Sent:
    """Where messages went, in the order they were given."""

    message_id: pa.Array
    queue_id: Int32s
    queue_offset: Int64s

    def table(self) -> pa.Table:
        """As schema.SENT."""
        return pa.Table.from_arrays(
            [self.message_id, pa.array(self.queue_id), pa.array(self.queue_offset)],
            schema=schema.SENT,
        )


#: Heads that earlier sends of the same decision have moved: (topic_id, queue_id) -> max_offset.
Heads = dict[tuple[int, int], int]


def place(send: Send, state: State, now_ms: int, heads: Heads) -> tuple[list[Placed], Sent]:
    """Queues and offsets for a send; ``heads`` is carried from one send of a decision to the next.

    Raises:
        TopicNotFoundError: it was deleted meanwhile.
        DeliveryTimeError: a time further ahead than the broker allows.
    """
    topic = state.topics.get(send.topic_id)
    if topic is None:
        raise TopicNotFoundError(f"There is no topic {send.topic}.")
    n = len(send)
    if n == 0:
        empty = np.zeros(0, np.int64)
        return [], Sent(send.columns["message_id"], empty.astype(np.int32), empty)
    deliver_at, later = _delivery_times(send, now_ms)
    queue_id = np.zeros(n, dtype=np.int32)
    offsets = np.zeros(n, dtype=np.int64)
    placed = []
    for mask, scheduled in ((~later, False), (later, True)):
        rows = np.flatnonzero(mask)
        if not len(rows):
            continue
        to = state.topics[SCHEDULE_TOPIC_ID] if scheduled else topic
        chosen = _schedule_queues(send, rows) if scheduled else _queues(send, topic, rows, heads)
        queue_id[rows] = chosen
        offsets[rows] = _take_offsets(to, chosen, heads)
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
    return placed, Sent(send.columns["message_id"], queue_id, offsets)


def _delivery_times(send: Send, now_ms: int) -> tuple[Int64s, Mask]:
    """When each message is due, and which are not due yet."""
    level, at = send.columns["delay_level"], send.columns["deliver_at_ms"]
    n = len(send)
    if level.null_count == n and at.null_count == n:
        return np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.bool_)
    levels = np.clip(pc.fill_null(level, 0).to_numpy(), 0, len(_LEVELS) - 1)
    times = pc.fill_null(at, 0).to_numpy()
    due: Int64s = np.where(levels > 0, now_ms + _LEVELS[levels], times)
    if due.max() - now_ms > send.delay_max_ms:
        row = int(np.argmax(due - now_ms > send.delay_max_ms))
        raise DeliveryTimeError(f"Row {row}: due over {send.delay_max_ms} ms ahead.")
    return due, due > now_ms


def _queues(send: Send, topic: TopicState, rows: Int64s, heads: Heads) -> Int32s:
    if send.group_queue is not None:
        if send.queues != topic.topic.queues:  # altered since the table was prepared
            groups = send.columns["message_group"]
            return queue_of_groups(groups, topic.topic.queues)[rows]
        return send.group_queue[rows]
    n = topic.topic.queues
    moved = sum(
        head - topic.queues[q].max_offset
        for (t, q), head in heads.items()
        if t == topic.topic.topic_id
    )
    start = topic.messages() + moved
    return ((start + np.arange(len(rows))) % n).astype(np.int32)


def _schedule_queues(send: Send, rows: Int64s) -> Int32s:
    levels = pc.fill_null(send.columns["delay_level"], 0).to_numpy()[rows]
    return np.where(levels > 0, levels - 1, TIMER_QUEUE).astype(np.int32)


def _take_offsets(topic: TopicState, queue_id: Int32s, heads: Heads) -> Int64s:
    """The next offsets of these queues, dense per queue in row order."""
    topic_id = topic.topic.topic_id
    if len(queue_id) == 1:
        key = (topic_id, int(queue_id[0]))
        head = heads.get(key, topic.queues[key[1]].max_offset)
        heads[key] = head + 1
        return np.array([head], dtype=np.int64)
    order = np.argsort(queue_id, kind="stable")
    used, starts, counts = np.unique(queue_id[order], return_index=True, return_counts=True)
    rank = np.arange(len(queue_id)) - np.repeat(starts, counts)
    firsts = []
    for queue_id_, count in zip(used.tolist(), counts.tolist(), strict=True):
        key = (topic_id, queue_id_)
        head = heads.get(key, topic.queues[queue_id_].max_offset)
        heads[key] = head + count
        firsts.append(head)
    offsets = np.empty(len(queue_id), dtype=np.int64)
    offsets[order] = np.repeat(np.array(firsts, dtype=np.int64), counts) + rank
    return offsets


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
    whole = n == len(send)
    take: Callable[[pa.Array], pa.Array]
    take = (lambda a: a) if whole else (lambda a, at=pa.array(rows): a.take(at))  # type: ignore[misc]
    columns = {name: take(send.columns[name]) for name in _COPIED}
    groups = send.message_group_hash if whole else send.message_group_hash[rows]
    made: dict[str, Any] = {
        "topic_id": pa.array(np.full(n, topic_id, dtype=np.int32)),
        "queue_id": pa.array(queue_id),
        "queue_offset": pa.array(offsets),
        "message_group_hash": pa.array(groups),
        "stored_at_ms": pa.array(np.full(n, now_ms, dtype=np.int64)),
        "deliver_at_ms": _times(send, rows, deliver_at),
        "target_topic_id": pa.nulls(n, pa.int32())
        if target is None
        else pa.array(np.full(n, target, dtype=np.int32)),
    }
    batch = pa.RecordBatch.from_arrays(
        [columns[f.name] if f.name in columns else made[f.name] for f in schema.MESSAGE],
        schema=schema.MESSAGE,
    )
    tags = send.tag_hash if whole else send.tag_hash[rows]
    return Placed(topic_id, batch, queue_id, offsets, groups, tags, now_ms)


def _times(send: Send, rows: Int64s, deliver_at: Int64s | None) -> pa.Array:
    given = send.columns.get("delivered_at")
    if given is not None:
        return given.take(pa.array(rows))
    if deliver_at is None:
        return pa.nulls(len(rows), pa.int64())
    return pa.array(deliver_at[rows])


_COPIED: Final = ("message_id", "tag", "keys", "message_group", "properties", "body", "born_at_ms")
