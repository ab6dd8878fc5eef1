"""Locking queues for one client, and releasing the deliveries of the client before it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from rmq_pipeline.broker.decide.dead_members import Begun, begun_offsets, died_with
from rmq_pipeline.broker.decide.release import release_running
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state import lease_table
from rmq_pipeline.broker.state.consumption import QueueKey
from rmq_pipeline.broker.state.event_rows import EventRows, single
from rmq_pipeline.broker.state.queue_locks import Key
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.errors import IllegalQueueError
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import Kind

_NONE: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class LockQueues(Request):
    """Request that locks queues for a client, or extends its locks."""

    group: str
    topic: str
    queue_ids: tuple[int, ...]
    client_id: str
    duration_ms: int

    def decide(self, state: State, now_ms: int) -> Decision:
        """Lock the queues that no other client has locked; the answer is their ids.

        When a queue changes hands, the deliveries that other clients still have of it are released.
        """
        decision = Decision([])
        for queue_id, key in _keys(state, self.group, topic=self.topic, queue_ids=self.queue_ids):
            lock = state.queue_locks.get(key)
            held = lock if lock is not None and lock.holds(now_ms) else None
            if held is not None and held.client_id != self.client_id:
                continue
            decision.answer.append(queue_id)
            decision.events.append(
                single(
                    Kind.QUEUE_LOCKED,
                    now_ms,
                    **QueueKey(*key)._asdict(),
                    visible_at_ms=now_ms + self.duration_ms,
                    locked_at_ms=now_ms if held is None else held.locked_at_ms,
                    client_id=self.client_id,
                )
            )
            if held is None:
                decision.events.extend(_ended(state, key, now_ms=now_ms))
        return decision


@dataclass(frozen=True, slots=True)
class UnlockQueues(Request):
    """Request that unlocks queues."""

    group: str
    topic: str
    queue_ids: tuple[int, ...]
    client_id: str

    def decide(self, state: State, now_ms: int) -> Decision:
        """Unlock the client's queues; the answer is their ids, including expired locks."""
        decision = Decision([])
        for queue_id, key in _keys(state, self.group, topic=self.topic, queue_ids=self.queue_ids):
            lock = state.queue_locks.get(key)
            if lock is not None and lock.client_id == self.client_id:
                decision.answer.append(queue_id)
                decision.events.extend(
                    _unlocked(state, key, client_id=self.client_id, now_ms=now_ms)
                )
        return decision


@dataclass(frozen=True, slots=True)
class UnlockMember(Request):
    """Request that removes the locks of a client that is gone."""

    group: str
    client_id: str
    #: Time at which it was gone; locks renewed later are kept, as the client is back. None: it has
    #: left by itself.
    gone_at_ms: int | None = None
    #: Work that its listener may have had when it died; None: it has left in good order.
    begun: Begun | None = None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return messages whose attempt counts as the answer.

        Each is (topic, queue_id, queue_offset).
        """
        decision = Decision([])
        group_id = state.group_ids.get(self.group, 0)
        until = lease_table.FAR if self.gone_at_ms is None else self.gone_at_ms
        for key, lock in state.queue_locks.of_group(group_id):
            if lock.client_id == self.client_id and lock.renewed_at_ms <= until:
                counted = self._counted(decision, state, key=key, now_ms=now_ms)
                decision.events.extend(
                    _unlocked(state, key, client_id=self.client_id, now_ms=now_ms, but=counted)
                )
        return decision

    def _counted(self, decision: Decision, state: State, *, key: Key, now_ms: int) -> Int64s:
        """Add the events of a queue's deliveries whose attempt counts; return their offsets."""
        consumption, topic = state.consumptions.get(key), state.topics.get(key[1])
        if self.begun is None or consumption is None or topic is None:
            return np.zeros(0, np.int64)
        name = topic.topic.name
        offsets = begun_offsets(consumption, self.begun, queue=(name, key[2]), now_ms=now_ms)
        if len(offsets):
            decision.answer.extend((name, key[2], offset) for offset in offsets.tolist())
            events = [died_with(consumption, offsets, now_ms=now_ms)]
            decision.events.extend(QueueKey(*key).events(events, now_ms))
        return offsets


@dataclass(frozen=True, slots=True)
class LocksOfGroup(Request):
    """Query for the valid locks of a consumer group."""

    group: str

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the locks as JSON-able dicts, by topic and queue, as the answer; store nothing."""
        found = [
            {
                "topic": state.topics[key[1]].topic.name,
                "queue_id": key[2],
                "client_id": lock.client_id,
                "locked_at_ms": lock.locked_at_ms,
                "expires_at_ms": lock.expires_at_ms,
            }
            for key, lock in state.queue_locks.of_group(state.group(self.group).group_id)
            if lock.holds(now_ms)
        ]
        return Decision(sorted(found, key=lambda lock: (lock["topic"], lock["queue_id"])))


def _keys(
    state: State, group: str, *, topic: str, queue_ids: tuple[int, ...]
) -> Iterator[tuple[int, Key]]:
    found, group_id = state.topic(topic), state.group(group).group_id
    for queue_id in queue_ids:
        if not 0 <= queue_id < len(found.queues):
            raise IllegalQueueError(f"Topic {topic} has no queue {queue_id}.")
        yield queue_id, (group_id, found.topic.topic_id, queue_id)


def _unlocked(
    state: State, key: Key, *, client_id: str, now_ms: int, but: Int64s = _NONE
) -> Iterator[EventRows]:
    yield single(Kind.QUEUE_UNLOCKED, now_ms, **QueueKey(*key)._asdict(), client_id=client_id)
    yield from _ended(state, key, now_ms=now_ms, but=but)


def _ended(state: State, key: Key, *, now_ms: int, but: Int64s = _NONE) -> list[EventRows]:
    """Release all running deliveries of the queue, except ``but``; no attempt is counted."""
    consumption = state.consumptions.get(key)
    if consumption is None or not len(consumption.leases):
        return []
    every = ~np.isin(consumption.leases.offset, but)
    return QueueKey(*key).events(release_running(consumption, every, now_ms=now_ms), now_ms)
