"""Requests that read, commit, reset and copy offsets of consumer groups."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.consumption import Consumption, QueueKey
from rmq_pipeline.broker.state.event_rows import single
from rmq_pipeline.broker.state.state import Queue, State
from rmq_pipeline.errors import IllegalOffsetError, IllegalQueueError, InUseError, RequestError
from rmq_pipeline.store.events import Kind

#: Offset of a queue that the group has not started.
NOWHERE = -1
#: Value of ``delivery`` in a RESET that the reader made itself.
_BY_ITSELF = -1


@dataclass(frozen=True, slots=True)
class CommitOffsets(Request):
    """Request that commits a reader's offsets, unless the group was reset meanwhile."""

    group: str
    topic: str
    #: By queue_id: the expected offset, or NOWHERE for any, and the new one.
    changes: Mapping[int, tuple[int, int]]
    client_id: str
    #: By queue_id: the number of resets that the reader knows of.
    resets: Mapping[int, int]

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the committed offset of each named queue as the answer."""
        topic, group = state.topic(self.topic), state.group(self.group)
        locked = state.queue_locks.of_others(
            group.group_id, topic.topic.topic_id, client_id=self.client_id, now_ms=now_ms
        )
        decision = Decision({})
        for queue_id, (before, asked) in self.changes.items():
            queue = _queue(topic.queues, queue_id, topic=self.topic)
            if queue_id in locked:
                refusal = locked[queue_id].refusal(queue_id, topic=self.topic, group=self.group)
                raise refusal
            if asked > queue.max_offset:
                raise IllegalOffsetError(
                    f"Queue {queue_id} of topic {self.topic} ends at {queue.max_offset}, before"
                    f" {asked}."
                )
            key = QueueKey(group.group_id, topic.topic.topic_id, queue_id)
            known = state.consumptions.get(key)
            committed, resets = _place(known)
            knows_all = self.resets.get(queue_id, resets) == resets
            if before not in (NOWHERE, committed) or not knows_all:
                decision.answer[queue_id] = committed
                continue
            after = max(asked, queue.min_offset)
            decision.answer[queue_id] = after
            if after == committed:
                continue
            if known is not None and (len(known.leases) or known.backlog):
                raise InUseError(
                    f"Queue {queue_id} of topic {self.topic} has messages that were delivered to"
                    f" group {self.group} and are not settled, or that wait for such messages."
                    " A group either receives messages or reads them by offset.",
                    remedy="Settle the delivered messages first, or use another group.",
                )
            back = after < committed
            decision.events.append(
                single(
                    Kind.RESET if back else Kind.OFFSET_UPDATED,
                    now_ms,
                    offset=after,
                    delivery=_BY_ITSELF if back else 0,
                    **key._asdict(),
                )
            )
        return decision


@dataclass(frozen=True, slots=True)
class StartOffsets(Request):
    """Request that sets the first offsets of a group in a topic."""

    group: str
    topic: str
    where: Literal["last", "first"] | Mapping[int, int]

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the committed offset of each queue as the answer.

        If the group has an offset in any queue of the topic, the others start at their first
        message. They may have been added later, and the group must not lose their messages.
        """
        topic, group = state.topic(self.topic), state.group(self.group)
        decision = Decision({})
        keys = [
            QueueKey(group.group_id, topic.topic.topic_id, queue_id)
            for queue_id in range(len(topic.queues))
        ]
        has_begun = any(_place(state.consumptions.get(key))[0] != NOWHERE for key in keys)
        for key, queue in zip(keys, topic.queues, strict=True):
            committed, _ = _place(state.consumptions.get(key))
            if committed == NOWHERE:
                committed = queue.min_offset if has_begun else self._start(key.queue_id, queue)
                decision.events.append(
                    single(Kind.OFFSET_UPDATED, now_ms, offset=committed, **key._asdict())
                )
            decision.answer[key.queue_id] = committed
        return decision

    def _start(self, queue_id: int, queue: Queue) -> int:
        if self.where == "last":
            return queue.max_offset
        if self.where == "first":
            return queue.min_offset
        return min(max(self.where.get(queue_id, 0), queue.min_offset), queue.max_offset)


@dataclass(frozen=True, slots=True)
class CloneOffsets(Request):
    """Request that copies the offsets of a group; the target's leases and backlogs end."""

    from_group: str
    to_group: str
    topic: str

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the new offset of each queue that the source group has started."""
        topic = state.topic(self.topic)
        source, target = state.group(self.from_group), state.group(self.to_group)
        if source is target:
            raise RequestError(
                f"Group {self.from_group} is both the source and the target of the copy."
            )
        decision = Decision({})
        for queue_id, queue in enumerate(topic.queues):
            key = QueueKey(source.group_id, topic.topic.topic_id, queue_id)
            committed, _ = _place(state.consumptions.get(key))
            if committed == NOWHERE:
                continue
            offset = min(max(committed, queue.min_offset), queue.max_offset)
            decision.answer[queue_id] = offset
            moved = key._replace(group_id=target.group_id)
            decision.events.append(single(Kind.RESET, now_ms, offset=offset, **moved._asdict()))
        return decision


@dataclass(frozen=True, slots=True)
class Places(Request):
    """Query for a group's offsets, and the number of resets of each."""

    group: str
    topic: str

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return both for each queue of the topic."""
        topic, group_id = state.topic(self.topic), state.group(self.group).group_id
        keys = (QueueKey(group_id, topic.topic.topic_id, each) for each in range(len(topic.queues)))
        return Decision({key.queue_id: _place(state.consumptions.get(key)) for key in keys})


@dataclass(frozen=True, slots=True)
class Resets(Request):
    """Query for the number of resets of a group, by topic and queue."""

    group: str
    topics: tuple[str, ...]

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return only queues with resets, in topics that exist."""
        group_id = state.group(self.group).group_id
        found = {name: dict(_resets(state, group_id, topic=name)) for name in self.topics}
        return Decision({name: counts for name, counts in found.items() if counts})


def _resets(state: State, group_id: int, *, topic: str) -> Iterator[tuple[int, int]]:
    found = state.topics.get(state.topic_ids.get(topic, 0))
    for queue_id in range(len(found.queues)) if found is not None else ():
        assert found is not None
        known = state.consumptions.get((group_id, found.topic.topic_id, queue_id))
        if known is not None and known.resets:
            yield queue_id, known.resets


def _place(consumption: Consumption | None) -> tuple[int, int]:
    """Return a group's committed offset and its number of resets."""
    if consumption is None or not consumption.touched:
        return NOWHERE, 0
    return consumption.committed_offset(), consumption.resets


def _queue(queues: list[Queue], queue_id: int, *, topic: str) -> Queue:
    if not 0 <= queue_id < len(queues):
        raise IllegalQueueError(f"Topic {topic} has no queue {queue_id}.")
    return queues[queue_id]


@dataclass(frozen=True, slots=True)
class ResetOffset(Request):
    """Request that resets a group's offset in some queues; its leases and backlogs there end."""

    group: str
    topic: str
    #: Offset of each queue; with ``clip``, clipped to the stored offsets.
    offsets: dict[int, int]
    clip: bool

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the new offset of each queue as the answer."""
        topic, group = state.topic(self.topic), state.group(self.group)
        decision = Decision({})
        for queue_id, asked in self.offsets.items():
            if not 0 <= queue_id < len(topic.queues):
                raise IllegalQueueError(f"Topic {self.topic} has no queue {queue_id}.")
            queue = topic.queues[queue_id]
            offset = min(max(asked, queue.min_offset), queue.max_offset)
            if offset != asked and not self.clip:
                raise IllegalOffsetError(
                    f"Queue {queue_id} of topic {self.topic} has offsets"
                    f" {queue.min_offset} to {queue.max_offset}, not {asked}."
                )
            decision.answer[queue_id] = offset
            decision.events.append(
                single(
                    Kind.RESET,
                    now_ms,
                    offset=offset,
                    group_id=group.group_id,
                    topic_id=topic.topic.topic_id,
                    queue_id=queue_id,
                )
            )
        return decision


@dataclass(frozen=True, slots=True)
class UpdateOffsets(Request):
    """Request that moves a reader's offsets forward; refused where the broker has leases."""

    group: str
    topic: str
    offsets: dict[int, int]

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the group's current offset in each named queue as the answer."""
        topic, group = state.topic(self.topic), state.group(self.group)
        decision = Decision({})
        for queue_id, asked in self.offsets.items():
            if not 0 <= queue_id < len(topic.queues):
                raise IllegalQueueError(f"Topic {self.topic} has no queue {queue_id}.")
            if asked > (high := topic.queues[queue_id].max_offset):
                raise IllegalOffsetError(
                    f"Queue {queue_id} of topic {self.topic} ends at {high}, before {asked}."
                )
            key = (group.group_id, topic.topic.topic_id, queue_id)
            known = state.consumptions.get(key)
            if known is not None and (len(known.leases) or known.backlog):
                raise InUseError(
                    f"Queue {queue_id} of topic {self.topic} has messages that were delivered to"
                    f" group {self.group} and are not settled, or that wait for such messages."
                    " Only a reader that uses the group alone can update its offsets.",
                    remedy="Settle the delivered messages first, or use another group.",
                )
            before = known.cursor if known is not None and known.touched else -1
            decision.answer[queue_id] = max(asked, before)
            if asked > before:
                where = dict(zip(("group_id", "topic_id", "queue_id"), key, strict=True))
                decision.events.append(single(Kind.OFFSET_UPDATED, now_ms, offset=asked, **where))
        return decision


@dataclass(frozen=True, slots=True)
class CommittedOffset(Request):
    """Query for the smallest unsettled offset of a group in a queue."""

    group: str
    topic: str
    queue_id: int

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the offset as the answer; None if the group has read nothing of the queue."""
        topic, group = state.topic(self.topic), state.group(self.group)
        if not 0 <= self.queue_id < len(topic.queues):
            raise IllegalQueueError(f"Topic {self.topic} has no queue {self.queue_id}.")
        found = state.consumptions.get((group.group_id, topic.topic.topic_id, self.queue_id))
        return Decision(found.committed_offset() if found is not None and found.touched else None)


class Offsets(Request):
    """Query for the topic and the (min_offset, max_offset) of its queues."""

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return both as the answer; store nothing."""
        topic = state.topic(self._topic)
        bounds = [(queue.min_offset, queue.max_offset) for queue in topic.queues]
        return Decision((topic.topic, bounds))
