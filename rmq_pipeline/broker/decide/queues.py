"""Choosing queues and offsets for the messages of a send."""

import numpy as np
import pyarrow as pa

from rmq_pipeline.broker.state.event_rows import run_starts
from rmq_pipeline.broker.state.state import TopicState
from rmq_pipeline.message import Int32s, Int64s, hash64, hashes_and_queues, queue_of_groups
from rmq_pipeline.topic import GROUPED, Topic

#: Heads moved by earlier sends of the same decision: (topic_id, queue_id) -> max_offset.
Heads = dict[tuple[int, int], int]


def queues_of(topic: Topic, columns: dict[str, pa.Array]) -> Int32s | None:
    """Return the queue of each message, -1 for the next in turn; None: the next in turn for all."""
    groups = columns["message_group"]
    if topic.type == "priority":
        highest: Int32s = np.minimum(columns["priority"].to_numpy(), topic.queues - 1)
        return highest
    if topic.type not in GROUPED or groups.null_count == len(groups):
        return _chosen(columns)
    if not groups.null_count:
        return queue_of_groups(groups, topic.queues)
    queue_id = _chosen(columns)
    if queue_id is None:
        queue_id = np.full(len(groups), -1, dtype=np.int32)
    grouped = groups.is_valid().to_numpy(zero_copy_only=False)
    queue_id[grouped] = queue_of_groups(groups.drop_null(), topic.queues)
    return queue_id


def _chosen(columns: dict[str, pa.Array]) -> Int32s | None:
    """Return the queues that the producer chose, -1 for none; the broker's own copies have none."""
    given = columns.get("queue_id")
    if given is None or given.null_count == len(given):
        return None
    queue_id: Int32s = given.fill_null(-1).to_numpy().copy()
    return queue_id


def hashes_and_queues_of(
    topic: Topic, columns: dict[str, pa.Array]
) -> tuple[Int64s, Int32s | None]:
    """Return the hash of each message's group, and the result of ``queues_of``."""
    groups = columns["message_group"]
    if topic.type in GROUPED and len(groups) and not groups.null_count:
        return hashes_and_queues(groups, topic.queues)
    return hash64(groups), queues_of(topic, columns) if len(groups) else None


def turns(topic: TopicState, count: int, *, heads: Heads) -> Int32s:
    """Return queues in turn for ``count`` messages that may go to any queue."""
    n, start = topic.topic.queues, _sent(topic, heads)
    # Each queue gets the same number, in adjacent rows: reading them takes a slice.
    steps = np.arange(count) * min(n, count) // count
    return ((start + steps) % n).astype(np.int32)


def turn(topic: TopicState, *, heads: Heads) -> int:
    """Return the next queue in turn, for one message."""
    return _sent(topic, heads) % topic.topic.queues


def _sent(topic: TopicState, heads: Heads) -> int:
    """Return how many messages were ever sent to the topic, including this decision's."""
    moved = sum(
        head - topic.queues[q].max_offset
        for (t, q), head in heads.items()
        if t == topic.topic.topic_id
    )
    return topic.messages() + moved


def take_offsets(topic: TopicState, queue_id: Int32s, *, heads: Heads) -> Int64s:
    """Return the next offsets of these queues, dense per queue in row order."""
    topic_id = topic.topic.topic_id
    if len(queue_id) == 1:
        key = (topic_id, int(queue_id[0]))
        head = heads.get(key, topic.queues[key[1]].max_offset)
        heads[key] = head + 1
        return np.array([head], dtype=np.int64)
    n = len(queue_id)
    starts = run_starts(queue_id)
    order = None
    if len(set(queue_id[starts].tolist())) < len(starts):
        order = np.argsort(queue_id, kind="stable")
        queue_id = queue_id[order]
        starts = run_starts(queue_id)
    counts = np.diff(np.append(starts, n))
    firsts = []
    for queue_id_, count in zip(queue_id[starts].tolist(), counts.tolist(), strict=True):
        key = (topic_id, queue_id_)
        head = heads.get(key, topic.queues[queue_id_].max_offset)
        heads[key] = head + count
        firsts.append(head)
    ordered: Int64s = np.repeat(np.array(firsts, dtype=np.int64) - starts, counts) + np.arange(n)
    if order is None:
        return ordered
    offsets = np.empty(n, dtype=np.int64)
    offsets[order] = ordered
    return offsets
