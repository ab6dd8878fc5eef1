"""Members of a consumer group: their queue locks, their lite topics, and their deaths.

A lock of a queue releases the deliveries of the client before it.

When a member dies, its listener may have had some of its deliveries. If a death counted nothing, a
message that kills its consumer would be redelivered forever. The broker knows the leases of the
member, but not the messages that the listener had. It counts the first of each queue, or of each
message group, up to the listener's concurrency. A counted message is a suspect. The next member
tries suspects one at a time and names the one it tries. Then a death counts for the named suspect
only.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rmq_pipeline import limits
from rmq_pipeline.broker.decide.deliver import subscribe_events
from rmq_pipeline.broker.decide.redeliver import release_running
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state import lease_table
from rmq_pipeline.broker.state.consumption import Consumption, QueueKey
from rmq_pipeline.broker.state.event_rows import EventRows, single
from rmq_pipeline.broker.state.lease_table import WAITING
from rmq_pipeline.broker.state.members import Key, synced
from rmq_pipeline.broker.state.state import State, TopicState
from rmq_pipeline.errors import IllegalQueueError, MessageTypeError
from rmq_pipeline.failure import Failure
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import Kind

#: Place of a message: topic, queue_id, queue_offset.
Place = tuple[str, int, int]
#: Failure shown in the dead letter.
_FAILURE: Final = Failure.of(
    "the consumer died while it may have been handling the message", error_type="ConsumerDied"
).to_json()
_NONE: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Begun:
    """State of its work that a member reports in a heartbeat."""

    #: Most messages of a queue that the listener has at a time.
    calls: int
    #: True if it handles a queue by offset, regardless of message groups.
    by_queue: bool
    #: Messages counted at an earlier death: they count again only if they are in ``trying``.
    suspects: frozenset[Place]
    #: Suspects that the listener has now.
    trying: frozenset[Place]

    @classmethod
    def of(cls, details: Mapping[str, Any], suspects: frozenset[Place]) -> "Begun | None":
        """Parse a member's details; return None if they do not describe its work.

        Entries of ``trying`` that name no message are skipped.
        """
        calls, trying = details.get("calls"), details.get("trying")
        if type(calls) is not int or calls < 1 or not isinstance(trying, list):
            return None
        places = (_place(each) for each in trying[: limits.GROUP_SUSPECTS])
        named = frozenset(place for place in places if place is not None)
        return cls(calls, details.get("order") == "queue", suspects, named)


def _place(said: object) -> Place | None:
    if not isinstance(said, list | tuple) or len(said) != 3:
        return None
    topic, queue_id, offset = said
    if type(topic) is not str or type(queue_id) is not int or type(offset) is not int:
        return None
    return topic, queue_id, offset


def begun_offsets(
    consumption: Consumption,
    begun: Begun,
    *,
    queue: tuple[str, int],
    now_ms: int,
) -> Int64s:
    """Return the offsets of a queue that the listener may have had."""
    leases = consumption.leases
    running = leases.alive & (leases.delivery > WAITING) & (leases.visible_at > now_ms)
    rows = np.flatnonzero(running)
    if not begun.by_queue:
        rows = consumption.handled_first(rows)
    places = [(*queue, offset) for offset in leases.offset[rows[: begun.calls]].tolist()]
    counted = [p[2] for p in places if p not in begun.suspects or p in begun.trying]
    return np.array(counted, dtype=np.int64)


def died_with(consumption: Consumption, offsets: Int64s, *, now_ms: int) -> EventRows:
    """Build the event that fails these deliveries and redelivers them at once."""
    leases = consumption.leases
    rows = leases.find(offsets)
    return EventRows(
        kind=Kind.EXPIRE,
        at_ms=now_ms,
        queue_offset=offsets,
        attempt=leases.attempt[rows],
        visible_at_ms=now_ms,
        delivery=WAITING,
        message_group_hash=leases.group[rows],
        detail=[_FAILURE] * len(rows),
    )


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


def lite_topic(state: State, name: str) -> TopicState:
    """Return the topic, which must be of type lite.

    Raises:
        TopicNotFoundError: the topic does not exist.
        MessageTypeError: it is of another type.
    """
    topic = state.topic(name)
    if topic.topic.type != "lite":
        raise MessageTypeError(
            f"Topic {name} is {topic.topic.type} and has no lite topics.",
            remedy="Subscribe to lite topics of a topic of type lite.",
        )
    return topic


@dataclass(frozen=True, slots=True)
class SyncLiteSubscription(Request):
    """Request that changes a client's lite topics; it gets messages that wait in new ones."""

    group: str
    topic: str
    client_id: str
    action: str
    names: tuple[str, ...]

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store one event with all lite topics of the client, if they changed.

        The answer is the client's lite topics.
        """
        topic, group = lite_topic(state, self.topic), state.group(self.group)
        topic_id = topic.topic.topic_id
        before = state.subscriptions.of(group.group_id, topic_id, client_id=self.client_id)
        after = synced(before, self.action, names=self.names)
        decision = Decision(after)
        if after == before.names:
            return decision
        decision.events.extend(subscribe_events(state, topic, group=group, now_ms=now_ms))
        decision.events.append(
            single(
                Kind.LITE_SUBSCRIPTION,
                now_ms,
                group_id=group.group_id,
                topic_id=topic_id,
                client_id=self.client_id,
                detail=json.dumps(after),
            )
        )
        return decision
