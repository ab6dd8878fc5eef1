"""Topics: names, types and settings."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, Self, get_args

from rmq_pipeline import limits
from rmq_pipeline.errors import IllegalTopicError, RequestError
from rmq_pipeline.text import is_text

TopicType = Literal["normal", "fifo", "delay", "transaction", "priority", "lite", "mixed"]

_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
_ALLOWED: Final = f"Use 1 to {limits.TOPIC_NAME_LENGTH} of the characters A-Z a-z 0-9 _ - % |."
DLQ_PREFIX: Final = "%DLQ%"
RETRY_PREFIX: Final = "%RETRY%"
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
SCHEDULE_TOPIC_ID: Final = 1
#: The queue of SCHEDULE_TOPIC_XXXX for times without a delay level; 0..17 are the levels 1..18.
TIMER_QUEUE: Final = len(limits.DELAY_LEVELS_MS)
#: The attribute that two messages share when one repeats the other.
Deduplicate = Literal["none", "message_id", "key"]
#: Topic of half messages, and topic of copies of those that were never resolved.
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
HALF_TOPIC_ID: Final = 2
GIVEN_UP_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
GIVEN_UP_TOPIC_ID: Final = 3
#: The smallest topic_id of a topic that a user created.
FIRST_TOPIC_ID: Final = 4
_SYSTEM: Final = frozenset(
    {
        SCHEDULE_TOPIC,
        HALF_TOPIC,
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        GIVEN_UP_TOPIC,
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        "TBW102",
    }
)
#: RocketMQ topics that this broker does not use; an older home may still have them.
_KEPT: Final = frozenset({"BenchmarkTest", "RMQ_SYS_TRACE_TOPIC", "CHECKPOINT_TOPIC"})
#: Topics that belong to consumer groups; their names may be longer by the prefix.
_OF_GROUPS: Final = (DLQ_PREFIX, RETRY_PREFIX)
#: Types whose messages may have a message group, which chooses the queue.
GROUPED: Final = frozenset({"fifo", "lite", "mixed"})
PartitionTime = str
#: Default; sinks of the topic's consumers are partitioned by born_at_ms.
PARTITION_TIME: Final = "born"


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic; ``topic_id`` is never reused, so a recreated topic shares nothing with it."""

    name: str
    topic_id: int
    type: TopicType
    queues: int
    #: stored, born, or the name of a property that holds ms since 1970.
    partition_time: PartitionTime
    created_at_ms: int
    #: For each resize, the ends of the earlier queues: new queues are read after those offsets.
    growths: tuple[tuple[int, ...], ...] = ()
    #: The attribute by which a message repeats another one stored within the window.
    deduplicate: Deduplicate = "none"
    deduplicate_window_ms: int = limits.DEDUPLICATE_WINDOW_MS
    #: Messages stored before this time do not count.
    deduplicate_since_ms: int = 0
    #: Sealed messages are deleted when they are older, or exceed these bytes; None: never.
    retention_ms: int | None = None
    retention_bytes: int | None = None

    def to_json(self) -> str:
        """Return the JSON for the commit log and the tables."""
        return json.dumps(asdict(self))

    def describe(self) -> dict[str, Any]:
        """Return the settings by name."""
        fields = asdict(self)
        del fields["growths"], fields["deduplicate_since_ms"]
        return fields

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the topic from the result of ``to_json``."""
        fields = json.loads(text)
        fields["growths"] = tuple(map(tuple, fields.get("growths", ())))
        return cls(**fields)

    def grown(self, ends: Sequence[int]) -> "Topic":
        """Return a copy that records a resize; ``ends`` are the ends of the earlier queues."""
        if self.type not in GROUPED or not any(ends):
            return self
        return replace(self, growths=(*self.growths, tuple(ends)))

    def settings(self) -> tuple[Any, ...]:
        """Return the settings in which two declarations of one topic must agree."""
        deduplicate = (self.deduplicate, self.deduplicate_window_ms)
        return (self.type, self.queues, self.partition_time, *deduplicate)

    def retains(self, *, retention_ms: int | None, retention_bytes: int | None) -> bool:
        """Return True if the retention is as requested; None requests nothing."""
        asked = ((retention_ms, self.retention_ms), (retention_bytes, self.retention_bytes))
        return all(wanted is None or (wanted or None) == have for wanted, have in asked)

    def deduplicating(self, deduplicate: Any, *, window_ms: Any, now_ms: int) -> "Topic":
        """Return a copy with another deduplication or window; None leaves one unchanged.

        Messages stored before deduplication began do not count.

        Raises:
            RequestError: they are out of range.
        """
        wanted = self.deduplicate if deduplicate is None else deduplicate
        window = self.deduplicate_window_ms if window_ms is None else window_ms
        check_deduplicate(wanted, window)
        since = self.deduplicate_since_ms
        if wanted != self.deduplicate:
            since = now_ms + 1
        elif window > self.deduplicate_window_ms:
            since = max(since, now_ms - self.deduplicate_window_ms + 1)
        return replace(
            self,
            deduplicate=wanted,
            deduplicate_window_ms=window,
            deduplicate_since_ms=since,
        )

    def retaining(self, *, retention_ms: Any, retention_bytes: Any) -> "Topic":
        """Return a copy with another retention; None leaves one unchanged, 0 is unlimited.

        Raises:
            RequestError: they are out of range.
        """
        check_retention(retention_ms, retention_bytes)
        changed = self
        if retention_ms is not None:
            changed = replace(changed, retention_ms=retention_ms or None)
        if retention_bytes is not None:
            changed = replace(changed, retention_bytes=retention_bytes or None)
        return changed

    def altered(self, *, queues: int | None, partition_time: str | None) -> "Topic":
        """Return a copy with other settings.

        Raises:
            RequestError: fewer queues than the topic has, or a value out of range.
        """
        if queues is not None and queues < self.queues:
            raise RequestError(
                f"Topic {self.name} has {self.queues} queues and cannot shrink to {queues}."
            )
        changed = replace(self, queues=queues if queues is not None else self.queues)
        if partition_time is not None:
            changed = replace(changed, partition_time=partition_time)
        check_settings(changed.type, changed.queues, partition_time=changed.partition_time)
        return changed


def check_name(name: Any) -> None:
    """Refuse a name that a user may not create.

    Raises:
        IllegalTopicError: wrong length or characters, or reserved for the system.
    """
    check_known(name)
    if name.startswith(_OF_GROUPS):
        raise IllegalTopicError(
            f"Topic name {name} is reserved for the system.", remedy="Choose another name."
        )


def check_known(name: Any) -> None:
    """Refuse a name that no topic can have, so that the remedy is not to create it.

    Raises:
        IllegalTopicError: wrong length or characters, or a system topic that this broker lacks.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise IllegalTopicError(
            f"Topic name {name!r} has characters that are not allowed.", remedy=_ALLOWED
        )
    of_group = name.startswith(_OF_GROUPS)
    if len(name) > (limits.SYSTEM_TOPIC_NAME_LENGTH if of_group else limits.TOPIC_NAME_LENGTH):
        raise IllegalTopicError(
            f"Topic name of {len(name)} characters is too long.", remedy=_ALLOWED
        )
    if name in _SYSTEM or name in _KEPT or name.startswith("rmq_sys_"):
        raise IllegalTopicError(
            f"Topic name {name} is reserved for the system.", remedy="Choose another name."
        )


def check_settings(type: Any, queues: Any, *, partition_time: Any) -> None:
    """Refuse settings out of range.

    Raises:
        RequestError: names the setting and the allowed values.
    """
    if type not in get_args(TopicType):
        raise RequestError(f"Topic type {type!r} is not one of {', '.join(get_args(TopicType))}.")
    if isinstance(queues, bool) or not isinstance(queues, int) or not 1 <= queues <= limits.QUEUES:
        raise RequestError(f"A topic must have 1 to {limits.QUEUES} queues, not {queues!r}.")
    if not is_text(partition_time) or not partition_time.strip():
        raise RequestError(
            f"partition_time must be stored, born, or a property name, not {partition_time!r}."
        )


def check_deduplicate(deduplicate: Any, window_ms: Any) -> None:
    """Refuse deduplication settings out of range.

    Raises:
        RequestError: names the setting and the allowed values.
    """
    if deduplicate not in get_args(Deduplicate):
        known = ", ".join(get_args(Deduplicate))
        raise RequestError(f"deduplicate must be one of {known}, not {deduplicate!r}.")
    most = limits.DEDUPLICATE_WINDOW_MAX_MS
    if isinstance(window_ms, bool) or not isinstance(window_ms, int) or not 1 <= window_ms <= most:
        raise RequestError(f"deduplicate_window_ms must be 1 to {most}, not {window_ms!r}.")


def check_retention(retention_ms: Any, retention_bytes: Any) -> None:
    """Refuse retention settings out of range; None and 0 are unlimited.

    Raises:
        RequestError: names the setting and the allowed values.
    """
    for name, value, least in (
        ("retention_ms", retention_ms, limits.RETENTION_MIN_MS),
        ("retention_bytes", retention_bytes, limits.RETENTION_MIN_BYTES),
    ):
        whole = isinstance(value, int) and not isinstance(value, bool)
        most = limits.RETENTION_MAX
        if value is not None and not (whole and (value == 0 or least <= value <= most)):
            raise RequestError(f"{name} must be 0 (unlimited) or {least} to {most}, not {value!r}.")


def is_system(name: str) -> bool:
    """Return True if clients may not send to the topic."""
    return name in _SYSTEM


def is_hidden(name: str) -> bool:
    """Return True if consumer groups may not read the topic: its messages are not visible yet."""
    return name in (SCHEDULE_TOPIC, HALF_TOPIC)
