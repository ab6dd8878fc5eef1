"""Creating, altering and deleting topics and consumer groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from rmq_pipeline import group as groups
from rmq_pipeline import limits
from rmq_pipeline import topic as topics
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.event_rows import EventRows, single
from rmq_pipeline.broker.state.lease_table import WAITING
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.errors import AlreadyExistsError, IllegalTopicError, InUseError, RequestError
from rmq_pipeline.group import Group
from rmq_pipeline.store.events import Kind
from rmq_pipeline.topic import (
    DLQ_PREFIX,
    GIVEN_UP_TOPIC,
    GIVEN_UP_TOPIC_ID,
    HALF_TOPIC,
    HALF_TOPIC_ID,
    SCHEDULE_TOPIC,
    SCHEDULE_TOPIC_ID,
    TIMER_QUEUE,
    Topic,
)


def topic_event(topic: Topic, now_ms: int) -> EventRows:
    """Build the event of a created or altered topic."""
    return single(Kind.TOPIC, now_ms, topic_id=topic.topic_id, detail=topic.to_json())


def system_topics(now_ms: int, *, levels: int) -> list[Topic]:
    """Return the system topics: for scheduled messages, half messages, and exhausted half messages.

    The schedule topic has a queue for each delay level, and one for given times.
    """
    queues = max(levels, TIMER_QUEUE) + 1
    return [
        Topic(SCHEDULE_TOPIC, SCHEDULE_TOPIC_ID, "delay", queues, "stored", now_ms),
        Topic(HALF_TOPIC, HALF_TOPIC_ID, "transaction", 1, "stored", now_ms),
        Topic(GIVEN_UP_TOPIC, GIVEN_UP_TOPIC_ID, "normal", 1, "stored", now_ms),
    ]


@dataclass(frozen=True, slots=True)
class Found(Request):
    """Request that creates the system topics of a new home, and adds delay levels to an old one."""

    levels: int

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store one event for each missing or altered topic."""
        wanted = system_topics(now_ms, levels=self.levels)
        missing = [each for each in wanted if each.topic_id not in state.topics]
        schedule = state.topics.get(SCHEDULE_TOPIC_ID)
        if schedule is not None and schedule.topic.queues < wanted[0].queues:
            missing.append(replace(schedule.topic, queues=wanted[0].queues))
        return Decision(events=[topic_event(each, now_ms) for each in missing])


@dataclass(frozen=True, slots=True)
class CreateTopic(Request):
    """Request that creates a topic; with ``ensure``, one with the same settings may exist."""

    name: str
    type: str
    queues: int
    #: None: that of the existing topic, or else PARTITION_TIME.
    partition_time: str | None
    ensure: bool
    deduplicate: str = "none"
    deduplicate_window_ms: int = limits.DEDUPLICATE_WINDOW_MS
    retention_ms: int | None = None
    retention_bytes: int | None = None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the Topic as the answer."""
        topics.check_name(self.name)
        known = state.topics.get(state.topic_ids.get(self.name, 0))
        partition_time = self.partition_time
        if partition_time is None:
            partition_time = topics.PARTITION_TIME if known is None else known.topic.partition_time
        topics.check_settings(self.type, self.queues, partition_time=partition_time)
        topics.check_deduplicate(self.deduplicate, self.deduplicate_window_ms)
        topic = Topic(
            self.name,
            state.next_topic_id,
            self.type,  # type: ignore[arg-type]  # check_settings has looked
            self.queues,
            partition_time,
            now_ms,
            deduplicate=self.deduplicate,  # type: ignore[arg-type]
            deduplicate_window_ms=self.deduplicate_window_ms,
        ).retaining(retention_ms=self.retention_ms, retention_bytes=self.retention_bytes)
        if known is not None:
            have = known.topic
            same = have.settings() == topic.settings() and have.retains(
                retention_ms=self.retention_ms, retention_bytes=self.retention_bytes
            )
            if self.ensure and same:
                return Decision(have)
            raise AlreadyExistsError(
                f"Topic {self.name} exists: type {have.type}, {have.queues} queues,"
                f" partition_time {have.partition_time}, deduplicate {have.deduplicate},"
                f" retention_ms {have.retention_ms}, retention_bytes {have.retention_bytes}."
            )
        return Decision(topic, events=[topic_event(topic, now_ms)])


@dataclass(frozen=True, slots=True)
class AlterTopic(Request):
    """Request that changes the settings of a topic."""

    name: str
    queues: int | None
    partition_time: str | None
    deduplicate: str | None = None
    deduplicate_window_ms: int | None = None
    retention_ms: int | None = None
    retention_bytes: int | None = None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the Topic as the answer."""
        known = state.topic(self.name)
        topic = known.topic
        if topics.is_system(topic.name):
            raise IllegalTopicError(
                f"Topic {topic.name} is a system topic; its settings are fixed."
            )
        changed = topic.altered(queues=self.queues, partition_time=self.partition_time)
        if changed.queues > topic.queues:
            changed = changed.grown([queue.max_offset for queue in known.queues])
        changed = changed.deduplicating(
            self.deduplicate, window_ms=self.deduplicate_window_ms, now_ms=now_ms
        ).retaining(retention_ms=self.retention_ms, retention_bytes=self.retention_bytes)
        if changed == topic:
            return Decision(topic)
        return Decision(changed, events=[topic_event(changed, now_ms)])


@dataclass(frozen=True, slots=True)
class DeleteTopic(Request):
    """Request that deletes a topic.

    Its receipts become void; its scheduled messages are dropped.
    """

    name: str
    force: bool

    def decide(self, state: State, now_ms: int) -> Decision:
        """Refuse while messages are in flight or scheduled for the topic, unless forced."""
        topic = state.topic(self.name).topic
        if topics.is_system(topic.name) or topic.name.startswith(DLQ_PREFIX):
            raise IllegalTopicError(f"Topic {self.name} is a system topic and cannot be deleted.")
        held = sum(
            int(np.count_nonzero(c.leases.delivery[c.leases.alive] > WAITING))
            for key, c in state.consumptions.items()
            if key[1] == topic.topic_id
        )
        scheduled = state.schedule.waiting_for(topic.topic_id)
        halves = state.halves.waiting_for(topic.topic_id)
        if (held or scheduled or halves) and not self.force:
            raise InUseError(
                f"Topic {self.name} has {held} messages in flight, {scheduled} scheduled and"
                f" {halves} half messages."
            )
        event = single(Kind.TOPIC_DELETED, now_ms, topic_id=topic.topic_id, detail=topic.to_json())
        answer = {"in_flight": held, "scheduled": scheduled, "halves": halves}
        return Decision(answer, events=[event])


@dataclass(frozen=True, slots=True)
class CreateGroup(Request):
    """Request that creates a consumer group and its dead letter topic."""

    name: str
    order: str
    max_attempts: int
    backoff_ms: Sequence[int]
    on_failure: str
    ensure: bool
    max_rate_per_s: float | None = None
    backoff: str | Mapping[str, Any] | None = None
    idempotency_window_ms: int = limits.IDEMPOTENCY_WINDOW_MS

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the Group as the answer."""
        groups.check_name(self.name)
        backoff = tuple(self.backoff_ms)
        groups.check_settings(
            order=self.order,
            max_attempts=self.max_attempts,
            backoff_ms=backoff,
            on_failure=self.on_failure,
        )
        rate = groups.checked_rate(self.max_rate_per_s)
        growth = groups.checked_backoff(self.backoff)
        window_ms = groups.checked_idempotency_window(self.idempotency_window_ms)
        known = state.groups.get(state.group_ids.get(self.name, 0))
        asked = (self.order, self.max_attempts, backoff, self.on_failure)
        if known is not None:
            delays = known.backoff_ms
            if (backoff, delays) == (limits.BACKOFF_MS, limits.FORMER_BACKOFF_MS):
                delays = backoff  # declared without a backoff, then and now
            have = (known.order, known.max_attempts, delays, known.on_failure)
            others = (known.max_rate_per_s, known.backoff, known.idempotency_window_ms)
            same = have == asked and others == (rate, growth, window_ms)
            if self.ensure and same:
                return Decision(known)
            raise AlreadyExistsError(
                f"Group {self.name} exists: order {known.order}, max_attempts"
                f" {known.max_attempts}, on_failure {known.on_failure}, backoff_ms"
                f" {list(known.backoff_ms)}, backoff {known.describe()['backoff']},"
                f" max_rate_per_s {known.max_rate_per_s}, idempotency_window_ms"
                f" {known.idempotency_window_ms}."
            )
        events = []
        dead = state.topic_ids.get(DLQ_PREFIX + self.name)
        if dead is None:
            dead = state.next_topic_id
            topic = Topic(DLQ_PREFIX + self.name, dead, "normal", 1, "stored", now_ms)
            events.append(topic_event(topic, now_ms))
        group = Group(
            self.name,
            state.next_group_id,
            *asked,  # type: ignore[arg-type]  # check_settings has looked
            created_at_ms=now_ms,
            dead_letter_topic_id=dead,
            max_rate_per_s=rate,
            backoff=growth,
            idempotency_window_ms=window_ms,
        )
        events.append(_group_event(group, now_ms))
        return Decision(group, events=events)


def _group_event(group: Group, now_ms: int) -> EventRows:
    return single(Kind.GROUP, now_ms, group_id=group.group_id, detail=group.to_json())


@dataclass(frozen=True, slots=True)
class AlterGroup(Request):
    """Request that changes the settings of a consumer group, except its order."""

    name: str
    changes: dict[str, Any]

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the Group as the answer."""
        group = state.group(self.name)
        if self.changes.get("order") not in (None, group.order):
            raise RequestError(
                f"Group {self.name} has order {group.order}, which cannot be altered.",
                remedy="Create another group with the other order.",
            )
        changed = group.altered(**self.changes)
        if changed == group:
            return Decision(group)
        return Decision(changed, events=[_group_event(changed, now_ms)])


@dataclass(frozen=True, slots=True)
class DeleteGroup(Request):
    """Request that deletes a consumer group and its progress; its dead letters stay."""

    name: str
    force: bool

    def decide(self, state: State, now_ms: int) -> Decision:
        """Refuse while messages are in flight for the group, unless forced."""
        group = state.group(self.name)
        held = sum(
            int(np.count_nonzero(c.leases.delivery[c.leases.alive] > WAITING))
            for key, c in state.consumptions.items()
            if key[0] == group.group_id
        )
        if held and not self.force:
            raise InUseError(f"Group {self.name} has {held} messages in flight.")
        event = single(Kind.GROUP_DELETED, now_ms, group_id=group.group_id, detail=group.to_json())
        return Decision({"in_flight": held}, events=[event])


def topics_table(state: State) -> pa.Table:
    """Return the topics that clients see, by name."""
    rows = sorted((t.topic for t in list(state.topics.values())), key=lambda t: t.name)
    return pa.Table.from_pylist(
        [row.describe() for row in rows if not topics.is_system(row.name)],
        schema=pa.schema(
            [
                ("name", pa.string()),
                ("topic_id", pa.int32()),
                ("type", pa.string()),
                ("queues", pa.int32()),
                ("partition_time", pa.string()),
                ("deduplicate", pa.string()),
                ("deduplicate_window_ms", pa.int64()),
                ("retention_ms", pa.int64()),
                ("retention_bytes", pa.int64()),
                ("created_at_ms", pa.int64()),
            ]
        ),
    )


def groups_table(state: State) -> pa.Table:
    """Return the consumer groups, by name."""
    rows = sorted(state.groups.values(), key=lambda g: g.name)
    return pa.Table.from_pylist(
        [{**row.describe(), "backoff": row.backoff_text()} for row in rows],
        schema=pa.schema(
            [
                ("name", pa.string()),
                ("group_id", pa.int32()),
                ("order", pa.string()),
                ("max_attempts", pa.int32()),
                ("backoff_ms", pa.list_(pa.int64())),
                ("backoff", pa.string()),
                ("on_failure", pa.string()),
                ("max_rate_per_s", pa.float64()),
                ("idempotency_window_ms", pa.int64()),
                ("created_at_ms", pa.int64()),
            ]
        ),
    )
