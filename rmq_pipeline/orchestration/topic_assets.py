"""Topics and groups as a pipeline declares them: made at the broker, shown by Dagster."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import dagster as dg

from rmq_pipeline import limits
from rmq_pipeline.flight.client import Client
from rmq_pipeline.group import OnFailure, Order
from rmq_pipeline.topic import Deduplicate, TopicType

KIND: Final = "rocketmq"
#: Dagster wants to know where partitions begin; what is older has no place in the grid.
LOG_FROM: Final = "2026-01-01-00:00"
_NOT_IN_KEYS: Final = re.compile(r"[^A-Za-z0-9_]+")


def identifier(name: str) -> str:
    """A topic's or group's name for Dagster: what it does not allow becomes ``_``."""
    return _NOT_IN_KEYS.sub("_", name)


def asset_key(name: str) -> dg.AssetKey:
    """The asset key of a topic or consumer group."""
    return dg.AssetKey(identifier(name))


@dataclass(frozen=True)
class DeclaredTopic:
    """A topic that a pipeline needs, and its external asset."""

    name: str
    type: TopicType
    queues: int
    partition_time: str
    description: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    deduplicate: Deduplicate = "none"
    deduplicate_window_ms: int = limits.DEDUPLICATE_WINDOW_MS
    retention_ms: int | None = None
    retention_bytes: int | None = None
    #: First and last hour of the grid of its log, UTC; until the present when there is no last.
    log_from: str = LOG_FROM
    log_until: str | None = None

    @property
    def key(self) -> dg.AssetKey:
        """Key of its asset."""
        return asset_key(self.name)

    def ensure(self, client: Client) -> dict[str, Any]:
        """Make it at the broker unless it is there.

        Raises:
            AlreadyExistsError: it is there with other settings.
        """
        return client.ensure_topic(
            self.name,
            type=self.type,
            queues=self.queues,
            partition_time=self.partition_time,
            deduplicate=self.deduplicate,
            deduplicate_window_ms=self.deduplicate_window_ms,
            retention_ms=self.retention_ms,
            retention_bytes=self.retention_bytes,
        )

    def spec(self, published_by: Iterable[dg.AssetKey] = ()) -> dg.AssetSpec:
        """Its external asset, downstream of the consumers that publish to it."""
        return dg.AssetSpec(
            self.key,
            deps=list(published_by),
            description=self.description or f"Topic {self.name}.",
            kinds={KIND, "topic"},
            tags=self.tags,
            metadata={
                "topic": self.name,
                "type": self.type,
                "queues": self.queues,
                "partition_time": self.partition_time,
                "deduplicate": self.deduplicate,
            },
        )


def topic(
    name: str,
    *,
    type: TopicType = "normal",
    queues: int = limits.DEFAULT_QUEUES,
    partition_time: str = "stored",
    description: str = "",
    tags: dict[str, str] | None = None,
    deduplicate: Deduplicate = "none",
    deduplicate_window_ms: int = limits.DEDUPLICATE_WINDOW_MS,
    retention_ms: int | None = None,
    retention_bytes: int | None = None,
    log_from: str = LOG_FROM,
    log_until: str | None = None,
) -> DeclaredTopic:
    """Declare a topic.

    Args:
        name: of the topic; its asset has the same.
        type: what messages it takes.
        queues: it gets when it is made.
        partition_time: stored, born, or a property that holds ms since 1970.
        description: shown with the asset.
        tags: of the asset.
        deduplicate: what makes a message the repetition of another one, which is not stored.
        deduplicate_window_ms: for how long.
        retention_ms: sealed messages that are older go; None: never.
        retention_bytes: of segments; the oldest go when there are more; None: never.
        log_from: first hour of the grid that shows what is sealed, such as 2013-01-01-00:00, UTC.
        log_until: the hour behind the last one; None: it grows with time.
    """
    return DeclaredTopic(
        name=name,
        type=type,
        queues=queues,
        partition_time=partition_time,
        description=description,
        tags=tags or {},
        deduplicate=deduplicate,
        deduplicate_window_ms=deduplicate_window_ms,
        retention_ms=retention_ms,
        retention_bytes=retention_bytes,
        log_from=log_from,
        log_until=log_until,
    )


@dataclass(frozen=True)
class DeclaredGroup:
    """A consumer group that a pipeline needs, and the topic it reads."""

    name: str
    topic: DeclaredTopic
    order: Order = "none"
    max_attempts: int = limits.DEFAULT_MAX_ATTEMPTS
    backoff_ms: Sequence[int] = limits.BACKOFF_MS
    on_failure: OnFailure = "dead_letter"
    #: customized (backoff_ms), exponential, or initial_ms, max_ms, multiplier.
    backoff: str | Mapping[str, Any] = "customized"
    idempotency_window_ms: int = limits.IDEMPOTENCY_WINDOW_MS

    def ensure(self, client: Client) -> dict[str, Any]:
        """Make it and its topic unless they are there; the topic counts as its lag from then on.

        Raises:
            AlreadyExistsError: one of them is there with other settings.
        """
        self.topic.ensure(client)
        group = client.ensure_group(
            self.name,
            order=self.order,
            max_attempts=self.max_attempts,
            backoff_ms=tuple(self.backoff_ms),
            on_failure=self.on_failure,
            backoff=self.backoff,
            idempotency_window_ms=self.idempotency_window_ms,
        )
        client.subscribe(self.name, self.topic.name)
        return group
