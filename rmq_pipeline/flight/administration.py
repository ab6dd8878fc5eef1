"""Topics, consumer groups, windows and background work, from another process."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.flight.calls import Calls, Window


class Administration(Calls):
    """The verbs that operators and the background work use."""

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
        """Create a topic; its fields.

        Args:
            deduplicate: message_id or key: what repeats a message of the window is not stored.
            retention_ms: sealed messages that are older go; None: never.
            retention_bytes: of segments; the oldest go when there are more; None: never.

        Raises:
            AlreadyExistsError: there is one of this name.
        """
        return self._facts(
            "create_topic",
            name=name,
            type=type,
            queues=queues,
            partition_time=partition_time,
            deduplicate=deduplicate,
            deduplicate_window_ms=deduplicate_window_ms,
            retention_ms=retention_ms,
            retention_bytes=retention_bytes,
        )

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
        """Create a topic unless it exists; its fields.

        Raises:
            AlreadyExistsError: it exists with other settings.
        """
        return self._facts(
            "ensure_topic",
            name=name,
            type=type,
            queues=queues,
            partition_time=partition_time,
            deduplicate=deduplicate,
            deduplicate_window_ms=deduplicate_window_ms,
            retention_ms=retention_ms,
            retention_bytes=retention_bytes,
        )

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
        """Change what is given; its fields.

        Args:
            retention_ms: 0 keeps messages for good; so does retention_bytes.
        """
        return self._facts(
            "alter_topic",
            name=name,
            queues=queues,
            partition_time=partition_time,
            deduplicate=deduplicate,
            deduplicate_window_ms=deduplicate_window_ms,
            retention_ms=retention_ms,
            retention_bytes=retention_bytes,
        )

    def delete_topic(self, name: str, *, force: bool = False) -> dict[str, Any]:
        """Delete a topic and all that is stored of it; its fields.

        Raises:
            InUseError: messages are in flight or scheduled, and it is not forced.
        """
        return self._facts("delete_topic", name=name, force=force)

    def list_topics(self) -> pa.Table:
        """A row per topic."""
        return self._table("list_topics")

    def describe_topic(self, name: str) -> dict[str, Any]:
        """Its fields, and min_offset and max_offset per queue."""
        return self._facts("describe_topic", name=name)

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
        """Create a consumer group; its fields.

        Args:
            backoff: customized (backoff_ms), exponential, or its initial_ms, max_ms, multiplier.

        Raises:
            AlreadyExistsError: there is one of this name.
        """
        return self._facts(
            "create_group",
            name=name,
            order=order,
            max_attempts=max_attempts,
            backoff_ms=list(backoff_ms),
            on_failure=on_failure,
            max_rate_per_s=max_rate_per_s,
            backoff=_plain(backoff),
            idempotency_window_ms=idempotency_window_ms,
        )

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
        """Create a consumer group unless it exists; its fields.

        Raises:
            AlreadyExistsError: it exists with other settings.
        """
        return self._facts(
            "ensure_group",
            name=name,
            order=order,
            max_attempts=max_attempts,
            backoff_ms=list(backoff_ms),
            on_failure=on_failure,
            max_rate_per_s=max_rate_per_s,
            backoff=_plain(backoff),
            idempotency_window_ms=idempotency_window_ms,
        )

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
        """Change what is given; its fields."""
        return self._facts(
            "alter_group",
            name=name,
            order=order,
            max_attempts=max_attempts,
            backoff_ms=None if backoff_ms is None else list(backoff_ms),
            on_failure=on_failure,
            max_rate_per_s=max_rate_per_s,
            backoff=_plain(backoff),
            idempotency_window_ms=idempotency_window_ms,
        )

    def delete_group(self, name: str, *, force: bool = False) -> dict[str, Any]:
        """Delete a consumer group and its progress; its fields.

        Raises:
            InUseError: messages are in flight for it, and it is not forced.
        """
        return self._facts("delete_group", name=name, force=force)

    def list_groups(self) -> pa.Table:
        """A row per consumer group."""
        return self._table("list_groups")

    def describe_group(self, name: str) -> dict[str, Any]:
        """Its fields; its members by client_id, and the locks of its queues."""
        return self._facts("describe_group", name=name)

    def subscribe(self, group: str, topic: str) -> None:
        """Count the whole topic as lag of the group from now on."""
        self._connection.call("subscribe", {"group": group, "topic": topic})

    # ----------------------------------------------------------------------------- background work

    def due(self) -> dict[str, Any]:
        """What waits to be done: per upkeep job, and per consumer group and topic."""
        return self._facts("due")

    def open_window(
        self, name: str, *, owner: str, duration_ms: int, takeover: bool = False
    ) -> dict[str, Any]:
        """Open the only window of this name (``upkeep/<job>`` or ``consumer/<group>``).

        Args:
            takeover: end a live one; its leases end at once.

        Returns:
            {"epoch"}, or {"yielded_to", "epoch", "expires_at_ms"} when another owner has it.
        """
        return self._facts(
            "open_window", name=name, owner=owner, duration_ms=duration_ms, takeover=takeover
        )

    def renew_window(self, name: str, *, epoch: int, duration_ms: int) -> dict[str, Any]:
        """Let the window end ``duration_ms`` from now.

        Raises:
            FencedError: a newer window has taken over.
        """
        return self._facts("renew_window", name=name, epoch=epoch, duration_ms=duration_ms)

    def close_window(self, name: str, *, epoch: int) -> None:
        """End the window."""
        self._connection.call("close_window", {"name": name, "epoch": epoch})

    def deliver_scheduled(
        self, *, wait_ms: int = 0, limit: int = 100_000, window: Window | None = None
    ) -> dict[str, Any]:
        """Move due scheduled messages to their topics, waiting up to ``wait_ms`` for the first.

        Returns:
            {"delivered", "dropped", "per_level", "lateness_ms": {"p50", "p99", "max"},
            "next_due_ms"}; levels are text.
        """
        return self._facts("deliver_scheduled", wait_ms=wait_ms, limit=limit, window=window)

    def revive(
        self, *, wait_ms: int = 0, limit: int = 100_000, window: Window | None = None
    ) -> dict[str, Any]:
        """Record ended leases, waiting up to ``wait_ms`` for the first.

        Returns:
            {"revived", "parked", "dead_lettered", "next_visible_ms", "unburied"}; the last: how
            many stay doomed, as they cannot be read or copied.
        """
        return self._facts("revive", wait_ms=wait_ms, limit=limit, window=window)

    def seal(
        self, *, limit_bytes: int = limits.LOG_FILE_BYTES, window: Window | None = None
    ) -> dict[str, Any]:
        """Write Parquet segments and drop log files that are no longer needed.

        Returns:
            {"segments", "rows", "bytes", "raw_bytes", "event_rows", "dropped_files"}.
        """
        return self._facts("seal", limit_bytes=limit_bytes, window=window)

    def status(self) -> dict[str, Any]:
        """Versions, home, process, log positions, memory, counts and flags of the broker."""
        return self._facts("status")

    def ping(self) -> dict[str, Any]:
        """Which process answers: {"pid"}."""
        return self._facts("ping")


def _plain(backoff: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """The policy as JSON has it."""
    return dict(backoff) if isinstance(backoff, Mapping) else backoff
