"""Locking queues for one client, and what becomes of those who had them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rmq_pipeline.broker.event_rows import EventRows, single
from rmq_pipeline.broker.failures.giving_back import release_running
from rmq_pipeline.broker.members.queue_locks import Key
from rmq_pipeline.broker.receiving import lease_table
from rmq_pipeline.broker.receiving.scan import QueueKey
from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.writer import Decision, Request
from rmq_pipeline.errors import IllegalOffsetError
from rmq_pipeline.store.events import Kind


@dataclass(frozen=True, slots=True)
class LockQueues(Request):
    """Have queues to oneself for a while, or for a while longer."""

    group: str
    topic: str
    queue_ids: tuple[int, ...]
    client_id: str
    duration_ms: int

    def decide(self, state: State, now_ms: int) -> Decision:
        """The answer is the queues that the client holds now; those of others are left out.

        What others still have of a queue that changes hands is taken from them.
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
                    epoch=now_ms if held is None else held.locked_at_ms,
                    client_id=self.client_id,
                )
            )
            if held is None:
                decision.events.extend(_ended(state, key, now_ms=now_ms))
        return decision


@dataclass(frozen=True, slots=True)
class UnlockQueues(Request):
    """Let queues go."""

    group: str
    topic: str
    queue_ids: tuple[int, ...]
    client_id: str

    def decide(self, state: State, now_ms: int) -> Decision:
        """The answer is the queues that the client had, whether or not their locks still held."""
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
    """A client of a consumer group is gone, and so are its locks."""

    group: str
    client_id: str
    #: When it went: what it has locked after that it has come back for. None: it says so itself.
    gone_at_ms: int | None = None

    def decide(self, state: State, now_ms: int) -> Decision:
        """The answer is how many there were."""
        decision = Decision(0)
        group_id = state.group_ids.get(self.group, 0)
        until = lease_table.FAR if self.gone_at_ms is None else self.gone_at_ms
        for key, lock in state.queue_locks.of_group(group_id):
            if lock.client_id == self.client_id and lock.renewed_at_ms <= until:
                decision.answer += 1
                decision.events.extend(
                    _unlocked(state, key, client_id=self.client_id, now_ms=now_ms)
                )
        return decision


@dataclass(frozen=True, slots=True)
class LocksOfGroup(Request):
    """A question: the locks of a consumer group that hold."""

    group: str

    def decide(self, state: State, now_ms: int) -> Decision:
        """Nothing is stored; the answer is JSON-able, by topic and queue."""
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
            raise IllegalOffsetError(f"Topic {topic} has no queue {queue_id}.")
        yield queue_id, (group_id, found.topic.topic_id, queue_id)


def _unlocked(state: State, key: Key, *, client_id: str, now_ms: int) -> Iterator[EventRows]:
    yield single(Kind.QUEUE_UNLOCKED, now_ms, **QueueKey(*key)._asdict(), client_id=client_id)
    yield from _ended(state, key, now_ms=now_ms)


def _ended(state: State, key: Key, *, now_ms: int) -> list[EventRows]:
    """Whoever has messages of the queue gives them back, and it was no attempt."""
    consumption = state.consumptions.get(key)
    if consumption is None or not len(consumption.leases):
        return []
    every = np.ones(len(consumption.leases.delivery), dtype=np.bool_)
    return QueueKey(*key).events(release_running(consumption, every, now_ms=now_ms), now_ms)
