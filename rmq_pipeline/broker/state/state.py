"""The broker's state in memory: the content of the commit log.

Requests only read it. The writer applies stored rows to it, and recovery replays them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa

from rmq_pipeline import group as groups
from rmq_pipeline import topic as topics
from rmq_pipeline.broker.state.consumption import Consumption
from rmq_pipeline.broker.state.duplicates import Duplicates
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.group_facts import SINK_KINDS, Paces, Redriven, SinkVersions
from rmq_pipeline.broker.state.group_order import ByGroup
from rmq_pipeline.broker.state.halves import Halves
from rmq_pipeline.broker.state.members import QueueLocks, Subscriptions
from rmq_pipeline.broker.state.placed import Placed
from rmq_pipeline.broker.state.queue_index import QueueIndex
from rmq_pipeline.broker.state.queue_order import ByQueue
from rmq_pipeline.broker.state.schedule import Schedule, keys_of
from rmq_pipeline.broker.state.stored_times import StoredTimes
from rmq_pipeline.errors import ConsumerGroupNotFoundError, FencedError, TopicNotFoundError
from rmq_pipeline.group import Group
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import Kind
from rmq_pipeline.topic import FIRST_TOPIC_ID, HALF_TOPIC_ID, SCHEDULE_TOPIC_ID, Topic

#: Remedy if a topic has the name of a group, or a group that of a topic.
_ORDER: Final = (
    "Check the name and the order: receive(group, topic) in Python, `rmq receive TOPIC GROUP` on"
    " the command line."
)


#: The order that a consumer group declares.
_ORDERS: Final = {"none": Consumption, "message_group": ByGroup, "queue": ByQueue}
#: Kinds of events that callers look up in DuckDB, and the kind that stands for each in
#: ``changed_at``.
_LOOKED_UP: Final = {
    Kind.SINK_FILE: Kind.SINK_FILE,
    Kind.SINK_REPLACED: Kind.SINK_FILE,
    Kind.EFFECT: Kind.EFFECT,
    Kind.SEGMENT: Kind.SEGMENT,
    Kind.SEGMENTS_REPLACED: Kind.SEGMENT,
    Kind.EVENT_SEGMENT: Kind.SEGMENT,
    Kind.EVENT_SEGMENTS_REPLACED: Kind.SEGMENT,
    Kind.EXPIRED: Kind.SEGMENT,
}


@dataclass(slots=True)
class Queue:
    """Message queue: offsets [min_offset, max_offset) exist."""

    min_offset: int = 0
    max_offset: int = 0
    index: QueueIndex = field(default_factory=QueueIndex)
    times: StoredTimes = field(default_factory=StoredTimes)


@dataclass(slots=True)
class TopicState:
    """Topic and its queues."""

    topic: Topic
    queues: list[Queue]

    def messages(self) -> int:
        """Return how many messages were ever stored; the round robin over the queues uses it."""
        return sum(queue.max_offset for queue in self.queues)


@dataclass(frozen=True, slots=True)
class Window:
    """Lease under which one run does one kind of background work."""

    name: str
    owner: str
    epoch: int
    expires_at_ms: int
    #: Last settle under this name, so that a repeated settle gets the same answer.
    settle_id: str = ""
    settle_answer: str = ""


@dataclass(slots=True)
class State:
    """State on which the verbs decide."""

    topics: dict[int, TopicState] = field(default_factory=dict)
    topic_ids: dict[str, int] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    group_ids: dict[str, int] = field(default_factory=dict)
    consumptions: dict[tuple[int, int, int], Consumption] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)
    duplicates: Duplicates = field(default_factory=Duplicates)
    halves: Halves = field(default_factory=Halves)
    redriven: Redriven = field(default_factory=Redriven)
    paces: Paces = field(default_factory=Paces)
    subscriptions: Subscriptions = field(default_factory=Subscriptions)
    queue_locks: QueueLocks = field(default_factory=QueueLocks)
    windows: dict[str, Window] = field(default_factory=dict)
    sinks: SinkVersions = field(default_factory=SinkVersions)
    next_topic_id: int = FIRST_TOPIC_ID
    next_group_id: int = 1
    last_at_ms: int = 0
    #: Log position of the frame being applied; set before it is applied.
    position: int = 0
    #: Log position of the last frame that changed data looked up in DuckDB. Keys: a kind, and the
    #: ids of the owner. Entries that DuckDB has are removed.
    changed_at: dict[tuple[int, ...], int] = field(default_factory=dict)
    #: Lead of the broker's time over the wall clock, in ms; never below 0.
    ahead_ms: int = 0

    def topic(self, name: str) -> TopicState:
        """Return the topic of that name.

        Raises:
            TopicNotFoundError: the topic does not exist.
            IllegalTopicError: the name is not valid.
        """
        found = self.topics.get(self.topic_ids.get(name, 0))
        if found is None:
            topics.check_known(name)
            if name in self.group_ids:
                raise TopicNotFoundError(
                    f"There is no topic {name}; {name} is a consumer group.", remedy=_ORDER
                )
            raise TopicNotFoundError(f"There is no topic {name}.")
        return found

    def group(self, name: str) -> Group:
        """Return the consumer group of that name.

        Raises:
            ConsumerGroupNotFoundError: the group does not exist.
            IllegalConsumerGroupError: the name is not valid.
        """
        found = self.groups.get(self.group_ids.get(name, 0))
        if found is None:
            groups.check_name(name)
            if name in self.topic_ids:
                raise ConsumerGroupNotFoundError(
                    f"There is no consumer group {name}; {name} is a topic.", remedy=_ORDER
                )
            raise ConsumerGroupNotFoundError(f"There is no consumer group {name}.")
        return found

    def consumption(self, group: Group, topic_id: int, *, queue_id: int) -> Consumption:
        """Return the group's state on the queue; if it is new, an empty one that is not kept."""
        found = self.consumptions.get((group.group_id, topic_id, queue_id))
        if found is None:
            found = self.order(group, topic_id)()
        return found

    def order(self, group: Group, topic_id: int) -> type[Consumption]:
        """Return the order in which the group takes the topic: lite topics are message groups."""
        topic = self.topics.get(topic_id)
        lite = topic is not None and topic.topic.type == "lite"
        return ByGroup if lite else _ORDERS[group.order]

    def fence(self, window: tuple[str, int] | None) -> int:
        """Return the epoch of a window if it is the newest; 0 without a window.

        Raises:
            FencedError: a newer epoch has opened the window, or it was closed.
        """
        if window is None:
            return 0
        name, epoch = window
        current = self.windows.get(name)
        if current is None or current.epoch != epoch or current.expires_at_ms == 0:
            raise FencedError(
                f"Epoch {epoch} of window {name} has ended"
                + (f": epoch {current.epoch} belongs to {current.owner}." if current else ".")
            )
        return epoch

    def append(self, placed: Placed, position: int) -> None:
        """Add the messages of the section at ``position``."""
        topic = self.topics.get(placed.topic_id)
        if topic is None:
            return
        self.last_at_ms = max(self.last_at_ms, placed.stored_at_ms)
        if placed.topic_id == SCHEDULE_TOPIC_ID:
            self.schedule.add(placed.scheduled(position))
        elif placed.topic_id == HALF_TOPIC_ID:
            placed.add_to(self.halves, position)
        self.duplicates.learn(placed)
        for queue_id, rows in placed.index_rows(position):
            queue = topic.queues[queue_id]
            queue.max_offset = rows.base + len(rows)
            if placed.stored_at_ms >= queue.times.next_ms:
                queue.times.note(rows.base, placed.stored_at_ms)
            if placed.topic_id in (SCHEDULE_TOPIC_ID, HALF_TOPIC_ID):
                self.changed_at[Kind.TOPIC, placed.topic_id] = self.position
            else:
                queue.index.append(rows)

    def apply(self, events: EventRows) -> None:
        """Apply events to the state."""
        self.last_at_ms = max(self.last_at_ms, events.at_ms)
        kind = events.kind
        if (looked_up := _LOOKED_UP.get(kind)) is not None:
            self.changed_at[looked_up, events.group_id] = self.position
        if kind == Kind.LEASE:
            self.paces.delivered(events.group_id, len(events), now_ms=events.at_ms)
        if kind <= Kind.QUEUE_UNLOCKED:
            self._apply_consumption(events)
        elif kind <= Kind.GROUP_DELETED:
            self._apply_metadata(events)
        elif kind == Kind.LITE_SUBSCRIPTION:
            self._apply_subscription(events)
        elif kind in (Kind.SCHEDULE_DELIVERED, Kind.SCHEDULE_DROPPED, Kind.SCHEDULE_RECALLED):
            self.schedule.remove(keys_of(events.queue_id, events.queue_offset))
            if kind == Kind.SCHEDULE_RECALLED:
                self.duplicates.recalled(events.queue_id, events.queue_offset)
        elif Kind.HALF <= kind <= Kind.HALF_GIVEN_UP:
            self.halves.apply(events)
        elif Kind.WINDOW <= kind <= Kind.SINK_REPLACED:
            self._apply_work(events)
        elif kind == Kind.EXPIRED and events.topic_id in self.topics:
            queue = self.topics[events.topic_id].queues[events.queue_id]
            queue.min_offset = max(queue.min_offset, int(events.queue_offset.max()))

    def _apply_consumption(self, events: EventRows) -> None:
        group = self.groups.get(events.group_id)
        if group is None or events.topic_id not in self.topics:
            return
        if events.kind in (Kind.QUEUE_LOCKED, Kind.QUEUE_UNLOCKED):
            self.queue_locks.apply(events)
        else:
            found = self.consumption(group, events.topic_id, queue_id=events.queue_id)
            self.consumptions[events.group_id, events.topic_id, events.queue_id] = found
            found.apply(events)

    def _apply_work(self, events: EventRows) -> None:
        if events.kind in (Kind.WINDOW, Kind.WINDOW_CLOSED, Kind.SETTLED):
            self._apply_window(events)
        elif events.kind in SINK_KINDS:
            self.sinks.apply(events)
        elif events.kind == Kind.REDRIVEN:
            self.redriven.add(events.topic_id, events.queue_id, offsets=events.queue_offset)

    def _apply_metadata(self, events: EventRows) -> None:
        for row in range(len(events)):
            if events.kind == Kind.TOPIC:
                self.put_topic(Topic.from_json(events.detail_of(row)))
            elif events.kind == Kind.TOPIC_DELETED:
                gone = self.topics.pop(events.topic_id, None)
                if gone is not None:
                    del self.topic_ids[gone.topic.name]
                self.duplicates.drop(events.topic_id)
                self._forget(topic_id=events.topic_id)
            elif events.kind == Kind.GROUP:
                self.put_group(Group.from_json(events.detail_of(row)))
            elif events.kind == Kind.GROUP_DELETED:
                lost = self.groups.pop(events.group_id, None)
                if lost is not None:
                    del self.group_ids[lost.name]
                self.paces.forget(events.group_id)
                self.sinks.forget([events.group_id])
                self._forget(group_id=events.group_id)

    def _apply_subscription(self, events: EventRows) -> None:
        if events.group_id in self.groups and events.topic_id in self.topics:
            for row in range(len(events)):
                self.subscriptions.put(
                    events.group_id,
                    events.topic_id,
                    client_id=events.client_id or "",
                    detail=events.detail_of(row),
                )

    def put_topic(self, topic: Topic) -> TopicState:
        """Add or change a topic."""
        state = self.topics.get(topic.topic_id)
        if state is None:
            state = self.topics[topic.topic_id] = TopicState(topic, [])
        state.topic = topic
        self.duplicates.put(topic)
        state.queues.extend(Queue() for _ in range(topic.queues - len(state.queues)))
        self.topic_ids[topic.name] = topic.topic_id
        self.next_topic_id = max(self.next_topic_id, topic.topic_id + 1)
        return state

    def put_group(self, group: Group) -> None:
        """Add or change a consumer group."""
        self.groups[group.group_id] = group
        self.paces.put(group, self.last_at_ms)
        self.group_ids[group.name] = group.group_id
        self.next_group_id = max(self.next_group_id, group.group_id + 1)

    def _forget(self, *, topic_id: int = 0, group_id: int = 0) -> None:
        self.subscriptions.forget(topic_id=topic_id, group_id=group_id)
        self.queue_locks.forget(topic_id=topic_id, group_id=group_id)
        gone = [k for k in self.consumptions if k[0] == group_id or k[1] == topic_id]
        for key in gone:
            del self.consumptions[key]

    def _apply_window(self, events: EventRows) -> None:
        name = events.detail_of(0)
        epoch = int(events.column("epoch", np.int64)[0])
        if events.kind == Kind.SETTLED:
            detail: Mapping[str, str] = json.loads(name)
            current = self.windows.get(detail["window"])
            if current is not None:
                self.windows[current.name] = Window(
                    current.name,
                    current.owner,
                    current.epoch,
                    current.expires_at_ms,
                    detail["settle_id"],
                    json.dumps(detail["answer"]),
                )
            return
        before = self.windows.get(name)
        expires = int(events.column("visible_at_ms", np.int64)[0])
        self.windows[name] = Window(
            name,
            events.window_owner or (before.owner if before else ""),
            epoch,
            expires if events.kind == Kind.WINDOW else 0,
            before.settle_id if before else "",
            before.settle_answer if before else "",
        )

    def keep(self, keyed_state: pa.RecordBatch) -> None:
        """Record that keyed state was stored; the state itself is in DuckDB only."""
        ids = keyed_state.schema.metadata
        owner = int(ids[b"group_id"]), int(ids[b"topic_id"])
        self.changed_at[Kind.SETTLED, *owner] = self.position

    def changed(self, kind: Kind, *owner: int) -> int:
        """Return the log position of the last frame that changed ``kind``; -1: DuckDB has it."""
        return self.changed_at.get((kind, *owner), -1)

    def forget_changes(self, dispatched: int) -> None:
        """Drop the changes before a log position, because DuckDB has them."""
        self.changed_at = {key: at for key, at in self.changed_at.items() if at >= dispatched}

    def learn(self, key: tuple[int, int, int], *, groups: Int64s, offsets: Int64s) -> None:
        """Keep the message groups and offsets that a receive skipped: they are in no event."""
        found = self.consumptions.get(key)
        if isinstance(found, ByGroup):
            found.learn(groups, offsets)
