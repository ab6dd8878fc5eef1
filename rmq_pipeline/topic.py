"""Topics: names, types, and what a topic is made of."""

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
DLQ_PREFIX: Final = "%DLQ%"
RETRY_PREFIX: Final = "%RETRY%"
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
SCHEDULE_TOPIC_ID: Final = 1
#: The queue of SCHEDULE_TOPIC_XXXX for times that are no delay level; 0..17 are the levels 1..18.
TIMER_QUEUE: Final = len(limits.DELAY_LEVELS_MS)
#: What two messages of a topic have in common when one repeats the other.
Deduplicate = Literal["none", "message_id", "key"]
#: Where half messages lie, and copies of those that nobody decided.
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
HALF_TOPIC_ID: Final = 2
GIVEN_UP_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
GIVEN_UP_TOPIC_ID: Final = 3
#: The smallest topic_id of a topic that somebody created.
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
#: Types whose messages may have a message group, which chooses the queue.
GROUPED: Final = frozenset({"fifo", "lite", "mixed"})
PartitionTime = str


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic; ``topic_id`` is never used again, so one made anew shares nothing with the old."""

    name: str
    topic_id: int
    type: TopicType
    queues: int
    #: stored, born, or the name of a property that holds ms since 1970.
    partition_time: PartitionTime
    created_at_ms: int
    #: For each time it grew, where its queues ended then: what is in new ones comes after that.
    growths: tuple[tuple[int, ...], ...] = ()
    #: What makes a message the repetition of one stored less than the window ago.
    deduplicate: Deduplicate = "none"
    deduplicate_window_ms: int = limits.DEDUPLICATE_WINDOW_MS
    #: What was stored before does not count.
    deduplicate_since_ms: int = 0
    #: Sealed messages go when they are older, or when there are more bytes of them; None: never.
    retention_ms: int | None = None
    retention_bytes: int | None = None

    def to_json(self) -> str:
        """As the commit log and the tables keep it."""
        return json.dumps(asdict(self))

    def describe(self) -> dict[str, Any]:
        """Its settings by name."""
        fields = asdict(self)
        del fields["growths"], fields["deduplicate_since_ms"]
        return fields

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What ``to_json`` wrote."""
        fields = json.loads(text)
        fields["growths"] = tuple(map(tuple, fields.get("growths", ())))
        return cls(**fields)

    def grown(self, ends: Sequence[int]) -> "Topic":
        """This topic, where its message groups may have left the queues that ended there."""
        if self.type not in GROUPED or not any(ends):
            return self
        return replace(self, growths=(*self.growths, tuple(ends)))

    def settings(self) -> tuple[Any, ...]:
        """What two topics of one name must share to be taken for one."""
        deduplicate = (self.deduplicate, self.deduplicate_window_ms)
        return (self.type, self.queues, self.partition_time, *deduplicate)

    def retains(self, *, retention_ms: int | None, retention_bytes: int | None) -> bool:
        """Whether it keeps its messages as is asked; None asks for nothing."""
        asked = ((retention_ms, self.retention_ms), (retention_bytes, self.retention_bytes))
        return all(wanted is None or (wanted or None) == have for wanted, have in asked)

    def deduplicating(self, deduplicate: Any, *, window_ms: Any, now_ms: int) -> "Topic":
        """This topic suppressing other repetitions, or in another window; None: as it does.

        What was stored before it began to does not count.

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
        """This topic keeping its messages for another time, or size; None: as it does; 0: for good.

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
        """This topic with other settings.

        Raises:
            RequestError: fewer queues than it has.
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
        IllegalTopicError: length, characters, or a system topic.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise IllegalTopicError(f"Topic name {name!r} has characters that are not allowed.")
    if len(name) > limits.TOPIC_NAME_LENGTH:
        raise IllegalTopicError(f"Topic name of {len(name)} characters is too long.")
    if name in _SYSTEM or name.startswith((DLQ_PREFIX, RETRY_PREFIX, "rmq_sys_")):
        raise IllegalTopicError(f"Topic name {name} is kept for the system.")


def check_settings(type: Any, queues: Any, *, partition_time: Any) -> None:
    """Refuse settings out of range.

    Raises:
        RequestError: what is wrong, with the values that are allowed.
    """
    if type not in get_args(TopicType):
        raise RequestError(f"Topic type {type!r} is none of {', '.join(get_args(TopicType))}.")
    if isinstance(queues, bool) or not isinstance(queues, int) or not 1 <= queues <= limits.QUEUES:
        raise RequestError(f"A topic has 1 to {limits.QUEUES} queues, not {queues!r}.")
    if not is_text(partition_time) or not partition_time.strip():
        raise RequestError(
            f"partition_time is stored, born, or the name of a property, not {partition_time!r}."
        )


def check_deduplicate(deduplicate: Any, window_ms: Any) -> None:
    """Refuse settings out of range.

    Raises:
        RequestError: what is wrong, with the values that are allowed.
    """
    if deduplicate not in get_args(Deduplicate):
        known = ", ".join(get_args(Deduplicate))
        raise RequestError(f"deduplicate is one of {known}, not {deduplicate!r}.")
    most = limits.DEDUPLICATE_WINDOW_MAX_MS
    if isinstance(window_ms, bool) or not isinstance(window_ms, int) or not 1 <= window_ms <= most:
        raise RequestError(f"deduplicate_window_ms is 1 to {most}, not {window_ms!r}.")


def check_retention(retention_ms: Any, retention_bytes: Any) -> None:
    """Refuse settings out of range; None and 0 are for good.

    Raises:
        RequestError: what is wrong, with the values that are allowed.
    """
    for name, value, least in (
        ("retention_ms", retention_ms, limits.RETENTION_MIN_MS),
        ("retention_bytes", retention_bytes, limits.RETENTION_MIN_BYTES),
    ):
        whole = isinstance(value, int) and not isinstance(value, bool)
        most = limits.RETENTION_MAX
        if value is not None and not (whole and (value == 0 or least <= value <= most)):
            raise RequestError(f"{name} is 0 for keeping all, or {least} to {most}, not {value!r}.")


def is_system(name: str) -> bool:
    """Whether clients may not send to it."""
    return name in _SYSTEM


def is_hidden(name: str) -> bool:
    """Whether no consumer group may read it: what lies there is not to be seen yet."""
    return name in (SCHEDULE_TOPIC, HALF_TOPIC)
