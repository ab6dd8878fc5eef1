"""Verbs: topics and consumer groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.access.rights import CONSUMES, Rights, on_group, on_topic
from rmq_pipeline.broker.decide import admin, group_offsets
from rmq_pipeline.broker.decide.deliver import Subscribe
from rmq_pipeline.broker.decide.members import LocksOfGroup
from rmq_pipeline.broker.decide.request import Request
from rmq_pipeline.broker.verbs.declaration import Opened, verb
from rmq_pipeline.broker.work.arguments import check_readable
from rmq_pipeline.topic import PARTITION_TIME


class Administration(Opened):
    """Verbs for topics and consumer groups."""

    def _described(self, request: Request) -> dict[str, Any]:
        described: dict[str, Any] = self._engine.submit(request).describe()
        return described

    @verb(rights=on_topic("create", "name"))
    def create_topic(
        self,
        name: str,
        *,
        type: str = "normal",
        queues: int = limits.DEFAULT_QUEUES,
        partition_time: str = PARTITION_TIME,
        deduplicate: str = "none",
        deduplicate_window_ms: int = limits.DEDUPLICATE_WINDOW_MS,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Create a topic.

        Args:
            name: 1 to 127 of the characters A-Z a-z 0-9 _ - % |.
            type: normal, fifo, delay, transaction, priority, lite or mixed.
            queues: number of queues; ``alter_topic`` can add more.
            partition_time: time that sinks partition by: born, stored, or the name of a property
                that holds ms since 1970.
            deduplicate: none, message_id or key; a message that repeats one of the window is not
                stored.
            deduplicate_window_ms: length of that window.
            retention_ms: sealed messages older than this are deleted; None keeps all.
            retention_bytes: the oldest segments are deleted while the topic has more bytes of them;
                None keeps all.

        Returns:
            The topic's fields.

        Raises:
            AlreadyExistsError: a topic of this name exists.
        """
        others = (deduplicate, deduplicate_window_ms, retention_ms, retention_bytes)
        request = admin.CreateTopic(name, type, queues, partition_time, False, *others)
        return self._described(request)

    @verb(rights=on_topic("create", "name"), repeatable=True)
    def ensure_topic(
        self,
        name: str,
        *,
        type: str = "normal",
        queues: int = limits.DEFAULT_QUEUES,
        partition_time: str | None = None,
        deduplicate: str = "none",
        deduplicate_window_ms: int = limits.DEDUPLICATE_WINDOW_MS,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Create a topic unless it exists; the arguments are those of ``create_topic``.

        Returns:
            The topic's fields.

        Raises:
            AlreadyExistsError: the topic exists with other settings.
        """
        others = (deduplicate, deduplicate_window_ms, retention_ms, retention_bytes)
        request = admin.CreateTopic(name, type, queues, partition_time, True, *others)
        return self._described(request)

    @verb(rights=on_topic("update", "name"))
    def alter_topic(
        self,
        name: str,
        *,
        queues: int | None = None,
        partition_time: str | None = None,
        deduplicate: str | None = None,
        deduplicate_window_ms: int | None = None,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Change the given settings of a topic; None leaves a setting as it is.

        Args:
            name: topic to change.
            queues: new number of queues; a topic never loses one.
            partition_time: see ``create_topic``, as for the rest.
            deduplicate: none, message_id or key.
            deduplicate_window_ms: messages stored before the change do not count for a longer
                window.
            retention_ms: 0 keeps all messages.
            retention_bytes: 0 keeps all segments.

        Returns:
            The topic's fields.
        """
        others = (deduplicate, deduplicate_window_ms, retention_ms, retention_bytes)
        return self._described(admin.AlterTopic(name, queues, partition_time, *others))

    @verb(rights=on_topic("delete", "name"))
    def delete_topic(self, name: str, *, force: bool = False) -> dict[str, Any]:
        """Delete a topic and all that is stored of it.

        Args:
            name: topic to delete.
            force: delete it even while messages are in flight or scheduled.

        Returns:
            The fields that the topic had.

        Raises:
            InUseError: messages are in flight or scheduled.
        """
        dropped: dict[str, Any] = self._engine.submit(admin.DeleteTopic(name, force))
        return dropped

    @verb(rights=Rights(cluster="list"), repeatable=True, on_standby=True)
    def list_topics(self) -> pa.Table:
        """Return all topics that clients see: name, topic_id and settings, one row each."""
        return admin.topics_table(self._engine.state)

    @verb(rights=on_topic("get", "name"), repeatable=True, on_standby=True)
    def describe_topic(self, name: str) -> dict[str, Any]:
        """Return a topic's fields, and min_offset and max_offset of each queue in ``offsets``.

        ``growths`` has a list for each time that queues were added: where the older queues ended.
        """
        topic, bounds = self._engine.submit(group_offsets.Offsets(name))
        offsets = [
            {"queue_id": i, "min_offset": low, "max_offset": high}
            for i, (low, high) in enumerate(bounds)
        ]
        growths = [list(ends) for ends in topic.growths]
        return {**topic.describe(), "growths": growths, "offsets": offsets}

    @verb(rights=on_group("create", "name"))
    def create_group(
        self,
        name: str,
        *,
        order: str = "none",
        max_attempts: int = limits.DEFAULT_MAX_ATTEMPTS,
        backoff_ms: Sequence[int] = limits.BACKOFF_MS,
        on_failure: str = "dead_letter",
        max_rate_per_s: float | None = None,
        backoff: str | Mapping[str, Any] | None = None,
        idempotency_window_ms: int = limits.IDEMPOTENCY_WINDOW_MS,
    ) -> dict[str, Any]:
        """Create a consumer group and its dead letter topic.

        Args:
            name: 1 to 120 of the characters A-Z a-z 0-9 _ - % |.
            order: none, message_group or queue.
            max_attempts: deliveries of one message, the first one counted.
            backoff_ms: delay after the first, second, … failure; the last one repeats.
            on_failure: what follows the last attempt: dead_letter, park or dead_letter_group.
            max_rate_per_s: deliveries per second over all topics; None is unlimited.
            backoff: customized (``backoff_ms``), exponential, or a mapping with initial_ms,
                max_ms and multiplier.
            idempotency_window_ms: how long the broker remembers idempotency keys of the group.

        Returns:
            The group's fields.

        Raises:
            AlreadyExistsError: a group of this name exists.
        """
        others = (max_rate_per_s, backoff, idempotency_window_ms)
        request = admin.CreateGroup(
            name, order, max_attempts, backoff_ms, on_failure, False, *others
        )
        return self._described(request)

    @verb(rights=on_group("create", "name"), repeatable=True)
    def ensure_group(
        self,
        name: str,
        *,
        order: str = "none",
        max_attempts: int = limits.DEFAULT_MAX_ATTEMPTS,
        backoff_ms: Sequence[int] = limits.BACKOFF_MS,
        on_failure: str = "dead_letter",
        max_rate_per_s: float | None = None,
        backoff: str | Mapping[str, Any] | None = None,
        idempotency_window_ms: int = limits.IDEMPOTENCY_WINDOW_MS,
    ) -> dict[str, Any]:
        """Create a consumer group unless it exists; the arguments are those of ``create_group``.

        Returns:
            The group's fields.

        Raises:
            AlreadyExistsError: the group exists with other settings.
        """
        others = (max_rate_per_s, backoff, idempotency_window_ms)
        request = admin.CreateGroup(
            name, order, max_attempts, backoff_ms, on_failure, True, *others
        )
        return self._described(request)

    @verb(rights=on_group("update", "name"))
    def alter_group(
        self,
        name: str,
        *,
        order: str | None = None,
        max_attempts: int | None = None,
        backoff_ms: Sequence[int] | None = None,
        on_failure: str | None = None,
        max_rate_per_s: float | None = None,
        backoff: str | Mapping[str, Any] | None = None,
        idempotency_window_ms: int | None = None,
    ) -> dict[str, Any]:
        """Change the given settings of a consumer group; its order cannot be changed.

        Returns:
            The group's fields.
        """
        changes = {
            "order": order,
            "max_attempts": max_attempts,
            "backoff_ms": backoff_ms,
            "on_failure": on_failure,
            "max_rate_per_s": max_rate_per_s,
            "backoff": backoff,
            "idempotency_window_ms": idempotency_window_ms,
        }
        return self._described(admin.AlterGroup(name, changes))

    @verb(rights=on_group("delete", "name"))
    def delete_group(self, name: str, *, force: bool = False) -> dict[str, Any]:
        """Delete a consumer group and its progress.

        Args:
            name: group to delete.
            force: delete it even while messages are in flight.

        Returns:
            The fields that the group had.

        Raises:
            InUseError: messages are in flight for the group.
        """
        dropped: dict[str, Any] = self._engine.submit(admin.DeleteGroup(name, force))
        self._engine.filters.forget(name)
        return dropped

    @verb(rights=Rights(cluster="list"), repeatable=True, on_standby=True)
    def list_groups(self) -> pa.Table:
        """Return all consumer groups: name, group_id and settings, one row each."""
        return admin.groups_table(self._engine.state)

    @verb(rights=on_group("get", "name"), repeatable=True, on_standby=True)
    def describe_group(self, name: str) -> dict[str, Any]:
        """Return a group's fields, its members by client_id, and the locks of its queues.

        ``members`` has topics, joined_at_ms, seen_at_ms and details of each member that sends
        heartbeats. ``filters`` has, by topic and filter, the clients that receive with it;
        ``mixed_filters`` the topics whose clients use several filters, which loses messages.
        """
        engine = self._engine
        fields = engine.state.group(name).describe()
        locks = engine.submit(LocksOfGroup(name))
        return {
            **fields,
            "members": engine.members.described(name),
            "locks": locks,
            "filters": engine.filters.of_group(name),
            "mixed_filters": engine.filters.mixed(name),
        }

    @verb(rights=CONSUMES, repeatable=True)
    def subscribe(self, group: str, topic: str) -> None:
        """Count all messages of a topic as lag of a group from now on."""
        check_readable(topic)
        self._engine.submit(Subscribe(topic, group))
