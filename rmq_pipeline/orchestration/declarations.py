"""Topics and groups declared by a pipeline: created at the broker, shown by Dagster."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final

import dagster as dg

from rmq_pipeline import group as groups
from rmq_pipeline import limits
from rmq_pipeline import topic as topics
from rmq_pipeline.errors import AlreadyExistsError, RequestError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.group import OnFailure, Order
from rmq_pipeline.topic import DLQ_PREFIX, PARTITION_TIME, Deduplicate, TopicType

KIND: Final = "rocketmq"
#: Default start of the partitions, which Dagster requires; older hours are not on the grid.
LOG_FROM: Final = "2026-01-01-00:00"
_HOUR: Final = "%Y-%m-%d-%H:%M"
#: Settings that a declaration may omit, and their values in a new topic or group; None: the broker
#: decides.
_TOPIC_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "partition_time": PARTITION_TIME,
        "deduplicate": "none",
        "deduplicate_window_ms": limits.DEDUPLICATE_WINDOW_MS,
        "retention_ms": None,
        "retention_bytes": None,
    }
)
_GROUP_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "max_attempts": limits.DEFAULT_MAX_ATTEMPTS,
        "backoff_ms": limits.BACKOFF_MS,
        "on_failure": "dead_letter",
        "backoff": None,
        "idempotency_window_ms": limits.IDEMPOTENCY_WINDOW_MS,
    }
)
_NOT_IN_KEYS: Final = re.compile(r"[^A-Za-z0-9_]+")


def check_callable(made: Any, what: str, *, takes: Sequence[str]) -> None:
    """Refuse a function that cannot be called with these positional arguments.

    Raises:
        ValueError: contains the function and its arguments.
    """
    said = f"{what} is called with {len(takes)}: {', '.join(takes)}."
    if not callable(made):
        raise ValueError(f"{said} {made!r} is no function.")  # noqa: TRY004 - as other checks
    try:
        parameters = inspect.signature(made)
    except (TypeError, ValueError):
        return  # a C function, whose signature is unknown
    try:
        parameters.bind(*takes)
    except TypeError as error:
        name = getattr(made, "__name__", repr(made))
        raise ValueError(f"{said} {name}{parameters} cannot be: {error}.") from error


def identifier(name: str) -> str:
    """Return a topic's or group's name for Dagster, with ``_`` for characters it does not allow."""
    return _NOT_IN_KEYS.sub("_", name)


def refuse_twins(names: Sequence[str], *, of: str) -> None:
    """Refuse names that map to the same asset key.

    Raises:
        ValueError: contains the names.
    """
    twins = [name for name, n in Counter(map(identifier, names)).items() if n > 1]
    if not twins:
        return
    same = sorted(name for name in names if identifier(name) == twins[0])
    raise ValueError(
        f"{' and '.join(same)} of {of} would be one asset, {twins[0]}. Rename one of them."
    )


def _hour(text: str, *, what: str) -> datetime:
    try:
        return datetime.strptime(text, _HOUR).replace(tzinfo=UTC)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} is {text!r}: give an hour such as {LOG_FROM}, UTC.") from error


def asset_key(name: str) -> dg.AssetKey:
    """Return the asset key of a topic or consumer group."""
    return dg.AssetKey(identifier(name))


def _declared(what: str, *checks: Callable[[], Any]) -> None:
    """Run the broker's checks where a declaration is written.

    Raises:
        ValueError: contains the declaration and what is wrong.
    """
    for check in checks:
        try:
            check()
        except RequestError as error:
            raise ValueError(f"{what}: {error}") from error


def _named(declared: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the code declares."""
    settings = {name: getattr(declared, name) for name in defaults}
    return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True)
class DeclaredTopic:
    """A topic that a pipeline needs, and its external asset."""

    name: str
    type: TopicType
    queues: int
    #: Settings that are None are not declared: an existing topic keeps its own.
    partition_time: str | None = None
    description: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    deduplicate: Deduplicate | None = None
    deduplicate_window_ms: int | None = None
    retention_ms: int | None = None
    retention_bytes: int | None = None
    #: First and last hour of the grid of its log, UTC; without a last hour it grows with time.
    log_from: str = LOG_FROM
    log_until: str | None = None

    def __post_init__(self) -> None:
        """Refuse settings that the broker or the grid would refuse."""
        what = f"topic {self.name!r}"
        made = {**_TOPIC_DEFAULTS, **self._settings()}
        _declared(
            what,
            lambda: topics.check_name(self.name),
            lambda: topics.check_settings(
                self.type, self.queues, partition_time=made["partition_time"]
            ),
            lambda: topics.check_deduplicate(made["deduplicate"], made["deduplicate_window_ms"]),
            lambda: topics.check_retention(self.retention_ms, self.retention_bytes),
        )
        until = self.log_until
        first = _hour(self.log_from, what=f"log_from of {what}")
        if until is not None and _hour(until, what=f"log_until of {what}") <= first:
            raise ValueError(f"log_until of {what} is {until}: it must lie after {self.log_from}.")

    @property
    def key(self) -> dg.AssetKey:
        """Key of its asset."""
        return asset_key(self.name)

    def _settings(self) -> dict[str, Any]:
        """Return the declared settings other than type and queues."""
        return _named(self, _TOPIC_DEFAULTS)

    def ensure(self, client: Client) -> dict[str, Any]:
        """Create the topic at the broker, or apply the declared settings to it.

        An existing topic keeps additional queues, and all settings that are not declared.

        Raises:
            AlreadyExistsError: the topic exists with another type.
        """
        settings = self._settings()
        try:
            return client.ensure_topic(self.name, type=self.type, queues=self.queues, **settings)
        except AlreadyExistsError:
            have = client.describe_topic(self.name)
        if have["type"] != self.type:
            raise AlreadyExistsError(
                f"Topic {self.name} is of type {have['type']}, and the code declares"
                f" {self.type}: the type of a topic cannot be altered.",
                remedy=f"Declare type={have['type']!r} or another topic, or delete this one with"
                f" its messages: `rmq topic delete {self.name}`.",
            )
        queues = max(self.queues, int(have["queues"]))
        return client.alter_topic(self.name, queues=queues, **settings)

    def spec(self, published_by: Iterable[dg.AssetKey] = ()) -> dg.AssetSpec:
        """Return its external asset, downstream of the consumers that publish to it."""
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
            }
            | self._settings(),
        )


def topic(
    name: str,
    *,
    type: TopicType = "normal",
    queues: int = limits.DEFAULT_QUEUES,
    partition_time: str | None = None,
    description: str = "",
    tags: dict[str, str] | None = None,
    deduplicate: Deduplicate | None = None,
    deduplicate_window_ms: int | None = None,
    retention_ms: int | None = None,
    retention_bytes: int | None = None,
    log_from: str = LOG_FROM,
    log_until: str | None = None,
) -> DeclaredTopic:
    """Declare a topic.

    Declared settings are applied to an existing topic. A setting that is None is not declared: an
    existing topic keeps its own, and a new one gets the default.

    Args:
        name: name of the topic and of its asset.
        type: type of the messages.
        queues: minimum number of queues.
        partition_time: born (the default), stored, or a property that holds ms since 1970.
        description: shown with the asset.
        tags: tags of the asset.
        deduplicate: criterion of repetitions, which are not stored; default: none.
        deduplicate_window_ms: how long a message suppresses its repetitions; default: ten minutes.
        retention_ms: maximum age of sealed messages; default: 0, unlimited.
        retention_bytes: maximum size of segments, above which the oldest are deleted; default: 0,
            unlimited.
        log_from: first hour of the grid of sealed messages, such as 2013-01-01-00:00, UTC.
        log_until: the hour after the last one; None: it grows with time.

    Raises:
        ValueError: the settings are invalid.
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
    #: Settings that are None are not declared: an existing group keeps its own.
    max_attempts: int | None = None
    backoff_ms: Sequence[int] | None = None
    on_failure: OnFailure | None = None
    #: customized (backoff_ms), exponential, or initial_ms, max_ms, multiplier.
    backoff: str | Mapping[str, Any] | None = None
    idempotency_window_ms: int | None = None
    #: Shown with the asset of a group whose consumers are programs outside Dagster.
    description: str = ""

    def __post_init__(self) -> None:
        """Refuse settings that the broker would refuse."""
        if not isinstance(self.topic, DeclaredTopic):
            raise ValueError(  # noqa: TRY004 - as other checks
                f"consumer group {self.name!r}: its topic is {self.topic!r}. Give what topic(...)"
                " returns."
            )
        made = {**_GROUP_DEFAULTS, **self._settings()}
        _declared(
            f"consumer group {self.name!r}",
            lambda: groups.check_name(self.name),
            lambda: groups.check_settings(
                order=self.order,
                max_attempts=made["max_attempts"],
                backoff_ms=tuple(made["backoff_ms"]),
                on_failure=made["on_failure"],
            ),
            lambda: groups.checked_backoff(self.backoff),
            lambda: groups.checked_idempotency_window(made["idempotency_window_ms"]),
        )

    @property
    def key(self) -> dg.AssetKey:
        """Key of its asset."""
        return asset_key(self.name)

    def spec(self) -> dg.AssetSpec:
        """Return its external asset, for a group whose consumers are programs outside Dagster."""
        return dg.AssetSpec(
            self.key,
            deps=[self.topic.key],
            description=self.description or f"Consumer group {self.name}, outside Dagster.",
            kinds={KIND, "consumer_group"},
            metadata={"topic": self.topic.name, "consumer_group": self.name, "order": self.order},
        )

    def _settings(self) -> dict[str, Any]:
        """Return the declared settings other than the order."""
        return _named(self, _GROUP_DEFAULTS)

    def ensure(self, client: Client) -> dict[str, Any]:
        """Create the group and its topic, or apply the declared settings to them.

        Messages of the topic count as lag from then on. Settings that are not declared are kept.

        Raises:
            AlreadyExistsError: the group has another order, or the topic another type.
        """
        self.topic.ensure(client)
        group = self._ensure(client)
        client.subscribe(self.name, self.topic.name)
        return group

    def _ensure(self, client: Client) -> dict[str, Any]:
        settings = self._settings()
        try:
            return client.ensure_group(self.name, order=self.order, **settings)
        except AlreadyExistsError:
            have = client.describe_group(self.name)
        if have["order"] != self.order:
            raise AlreadyExistsError(
                f"Consumer group {self.name} has order {have['order']}, and the code declares"
                f" {self.order}: the order of a group cannot be altered.",
                remedy=f"Declare that order or another group, or delete this one with its"
                f" progress: `rmq group delete {self.name}`.",
            )
        return client.alter_group(self.name, **settings)


def consumer_group(
    name: str,
    *,
    topic: DeclaredTopic,
    order: Order = "none",
    max_attempts: int | None = None,
    backoff_ms: Sequence[int] | None = None,
    backoff: str | Mapping[str, Any] | None = None,
    on_failure: OnFailure | None = None,
    idempotency_window_ms: int | None = None,
    description: str = "",
) -> DeclaredGroup:
    """Declare a consumer group whose consumers are programs outside Dagster.

    A setting that is None is not declared: an existing group keeps its own, and a new one gets the
    default.

    Args:
        name: name of the group and of its asset.
        topic: the topic that it reads.
        order: none, message_group or queue.
        max_attempts: maximum deliveries of a message; default: 17.
        backoff_ms: delays between the deliveries of a message.
        backoff: customized (backoff_ms), exponential, or initial_ms, max_ms, multiplier.
        on_failure: action when attempts are exhausted; default: dead_letter.
        idempotency_window_ms: how long idempotency keys are remembered; default: a day.
        description: shown with the asset.

    Raises:
        ValueError: the settings are invalid.
    """
    return DeclaredGroup(
        name=name,
        topic=topic,
        order=order,
        max_attempts=max_attempts,
        backoff_ms=None if backoff_ms is None else tuple(backoff_ms),
        on_failure=on_failure,
        backoff=backoff,
        idempotency_window_ms=idempotency_window_ms,
        description=description,
    )


def dead_letter_key(group: str) -> dg.AssetKey:
    """Return the key of the asset of a group's dead letters."""
    return dg.AssetKey(f"{identifier(group)}_dead_letters")


def dead_letter_spec(group: str, consumer: dg.AssetKey) -> dg.AssetSpec:
    """Return the external asset of a group's dead letter topic."""
    return dg.AssetSpec(
        dead_letter_key(group),
        deps=[consumer],
        description=f"Dead letters of {group}, with the reason of each.",
        kinds={KIND, "topic"},
        metadata={"topic": f"{DLQ_PREFIX}{group}", "consumer_group": group},
    )
