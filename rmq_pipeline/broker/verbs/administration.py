"""Topics and consumer groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.broker import admin, queries
from rmq_pipeline.broker.arguments import check_readable
from rmq_pipeline.broker.members.locking import LocksOfGroup
from rmq_pipeline.broker.receiving.deliver import Subscribe
from rmq_pipeline.broker.verbs.opened import Opened
from rmq_pipeline.broker.writer import Request


class Administration(Opened):
    """What is declared: topics, consumer groups, who reads what."""

    def _described(self, request: Request) -> dict[str, Any]:
        described: dict[str, Any] = self._engine.submit(request).describe()
        return described

    def create_topic(
        self,
        name: str,
        *,
        type: str = "normal",
        queues: int = limits.DEFAULT_QUEUES,
        partition_time: str = "stored",
        deduplicate: str = "none",
        deduplicate_window_ms: int = limits.DEDUPLICATE_WINDOW_MS,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Create a topic; AlreadyExistsError when there is one."""
        others = (deduplicate, deduplicate_window_ms, retention_ms, retention_bytes)
        request = admin.CreateTopic(name, type, queues, partition_time, False, *others)
        return self._described(request)

    def ensure_topic(
        self,
        name: str,
        *,
        type: str = "normal",
        queues: int = limits.DEFAULT_QUEUES,
        partition_time: str = "stored",
        deduplicate: str = "none",
        deduplicate_window_ms: int = limits.DEDUPLICATE_WINDOW_MS,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
    ) -> dict[str, Any]:
        """The topic, created if need be; AlreadyExistsError when it has other settings."""
        others = (deduplicate, deduplicate_window_ms, retention_ms, retention_bytes)
        request = admin.CreateTopic(name, type, queues, partition_time, True, *others)
        return self._described(request)

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
        """Give a topic more queues, another partition time, retention or suppression.

        Args:
            retention_ms: sealed messages that are older go; 0: never.
            retention_bytes: of segments; the oldest go when there are more; 0: never.
        """
        others = (deduplicate, deduplicate_window_ms, retention_ms, retention_bytes)
        return self._described(admin.AlterTopic(name, queues, partition_time, *others))

    def delete_topic(self, name: str, *, force: bool = False) -> dict[str, Any]:
        """Delete a topic; InUseError while messages are in flight or scheduled, unless forced."""
        dropped: dict[str, Any] = self._engine.submit(admin.DeleteTopic(name, force))
        return dropped

    def list_topics(self) -> pa.Table:
        """All topics: name, type, queues, partition_time, created_at_ms."""
        return admin.topics_table(self._engine.state)

    def describe_topic(self, name: str) -> dict[str, Any]:
        """A topic's fields, and min_offset and max_offset of each queue.

        ``growths``: for each time it grew, where the queues that there were ended then.
        """
        topic, bounds = self._engine.submit(queries.Offsets(name))
        offsets = [
            {"queue_id": i, "min_offset": low, "max_offset": high}
            for i, (low, high) in enumerate(bounds)
        ]
        growths = [list(ends) for ends in topic.growths]
        return {**topic.describe(), "growths": growths, "offsets": offsets}

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
        """Create a consumer group and its dead letter topic; AlreadyExistsError when it exists.

        Args:
            backoff: customized (backoff_ms), exponential, or its initial_ms, max_ms, multiplier.
        """
        others = (max_rate_per_s, backoff, idempotency_window_ms)
        request = admin.CreateGroup(
            name, order, max_attempts, backoff_ms, on_failure, False, *others
        )
        return self._described(request)

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
        """The group, created if need be; AlreadyExistsError when it has other settings."""
        others = (max_rate_per_s, backoff, idempotency_window_ms)
        request = admin.CreateGroup(
            name, order, max_attempts, backoff_ms, on_failure, True, *others
        )
        return self._described(request)

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
        """Other retries for a group; another order is refused."""
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

    def delete_group(self, name: str, *, force: bool = False) -> dict[str, Any]:
        """Delete a group and its progress; InUseError with messages in flight, unless forced."""
        dropped: dict[str, Any] = self._engine.submit(admin.DeleteGroup(name, force))
        return dropped

    def list_groups(self) -> pa.Table:
        """All groups: name, order, max_attempts, backoff_ms, on_failure, created_at_ms."""
        return admin.groups_table(self._engine.state)

    def describe_group(self, name: str) -> dict[str, Any]:
        """A group's fields; its members, by client_id, and the locks of its queues.

        ``members``: topics, joined_at_ms, seen_at_ms, details as they gave them. Consumers that
        another door knows of stand beside them.
        """
        engine = self._engine
        fields = engine.state.group(name).describe()
        locks = engine.submit(LocksOfGroup(name))
        return {**fields, "members": engine.members.described(name), "locks": locks}

    def subscribe(self, group: str, topic: str) -> None:
        """From now on the whole topic counts as the group's lag."""
        check_readable(topic)
        self._engine.submit(Subscribe(topic, group))
