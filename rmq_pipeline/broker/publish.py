"""Sending: what a topic takes, which queue each message goes to, and when it becomes visible."""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits, schema
from rmq_pipeline.admission import admit
from rmq_pipeline.broker.placed import Placed
from rmq_pipeline.broker.state import State, TopicState
from rmq_pipeline.broker.writer import Decision, Request
from rmq_pipeline.errors import DeliveryTimeError, TopicNotFoundError
from rmq_pipeline.message import Int32s, Int64s, MessageIds, hash64, queue_of_groups
from rmq_pipeline.tables import columns_of
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID, TIMER_QUEUE, Topic

_LEVELS: Final = np.array([0, *limits.DELAY_LEVELS_MS], dtype=np.int64)
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Send(Request):
    """Messages that were checked and may be placed; ``columns`` are those of schema.SEND.

    A copy into a dead letter topic is checked by nobody: what it copies was.
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

    def __len__(self) -> int:
        return len(self.tag_hash)

    def decide(self, state: State, now_ms: int) -> Decision:
        """Place the messages; the answer is a function that makes the table schema.SENT."""
        placed, sent = place(self, state, now_ms=now_ms, heads={})
        return Decision(answer=sent, placed=placed)


def prepare(
    topic: Topic, messages: pa.Table, *, ids: MessageIds, delay_max_ms: int, now_ms: int
) -> Send:
    """Check a table of schema.SEND against a topic, whole or not at all.

    Raises:
        RequestError: the row and what is wrong with it.
    """
    columns = columns_of(messages, schema.SEND)
    admit(topic, columns)
    return checked(topic, columns, ids=ids, delay_max_ms=delay_max_ms, now_ms=now_ms)


def checked(
    topic: Topic, columns: dict[str, pa.Array], *, ids: MessageIds, delay_max_ms: int, now_ms: int
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


def place(send: Send, state: State, *, now_ms: int, heads: Heads) -> tuple[list[Placed], Sent]:
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
        chosen = (
            _schedule_queues(send, rows)
            if scheduled
            else _queues(send, topic, rows=rows, heads=heads)
        )
        if send.group_queue is not None and len(rows) > 1:
            # A queue's messages lie side by side: reading them takes a slice and copies nothing.
            order = np.argsort(chosen, kind="stable")
            rows, chosen = rows[order], chosen[order]
        queue_id[rows] = chosen
        offsets[rows] = _take_offsets(to, chosen, heads=heads)
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


def _queues(send: Send, topic: TopicState, *, rows: Int64s, heads: Heads) -> Int32s:
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
    # As many to each queue, and those of one queue side by side: reading takes a slice.
    turns = np.arange(len(rows)) * min(n, len(rows)) // len(rows)
    return ((start + turns) % n).astype(np.int32)


def _schedule_queues(send: Send, rows: Int64s) -> Int32s:
    levels = pc.fill_null(send.columns["delay_level"], 0).to_numpy()[rows]
    return np.where(levels > 0, levels - 1, TIMER_QUEUE).astype(np.int32)


def _take_offsets(topic: TopicState, queue_id: Int32s, *, heads: Heads) -> Int64s:
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
    whole = n == len(send) and bool(np.all(rows[1:] > rows[:-1]))
    at = None if whole else pa.array(rows)
    columns = {
        name: send.columns[name] if whole else send.columns[name].take(at) for name in _COPIED
    }
    groups = send.message_group_hash if whole else send.message_group_hash[rows]
    made: dict[str, Any] = {
        "topic_id": pa.array(np.full(n, topic_id, dtype=np.int32)),
        "queue_id": pa.array(queue_id),
        "queue_offset": pa.array(offsets),
        "message_group_hash": pa.array(groups),
        "stored_at_ms": pa.array(np.full(n, now_ms, dtype=np.int64)),
        "deliver_at_ms": _times(send, rows, deliver_at=deliver_at),
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


def _times(send: Send, rows: Int64s, *, deliver_at: Int64s | None) -> pa.Array:
    given = send.columns.get("delivered_at")
    if given is not None:
        return given.take(pa.array(rows))
    if deliver_at is None:
        return pa.nulls(len(rows), pa.int64())
    return pa.array(deliver_at[rows])


_COPIED: Final = ("message_id", "tag", "keys", "message_group", "properties", "body", "born_at_ms")
