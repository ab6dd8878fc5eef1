"""Topics: names, types, and what a topic is made of."""

import json
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, Self, get_args

from rmq_pipeline import limits
from rmq_pipeline.errors import IllegalTopicError, RequestError

TopicType = Literal["normal", "fifo", "delay"]

_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
DLQ_PREFIX: Final = "%DLQ%"
RETRY_PREFIX: Final = "%RETRY%"
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
SCHEDULE_TOPIC_ID: Final = 1
#: The queue of SCHEDULE_TOPIC_XXXX for times that are no delay level; 0..17 are the levels 1..18.
TIMER_QUEUE: Final = len(limits.DELAY_LEVELS_MS)
_SYSTEM: Final = frozenset(
    {
        SCHEDULE_TOPIC,
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        "TBW102",
    }
)
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

    def to_json(self) -> str:
        """As the commit log and the tables keep it."""
        return json.dumps(asdict(self))

    def describe(self) -> dict[str, Any]:
        """Its fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What ``to_json`` wrote."""
        return cls(**json.loads(text))

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
    if not isinstance(partition_time, str) or not partition_time.strip():
        raise RequestError("partition_time is stored, born, or the name of a property.")


def is_system(name: str) -> bool:
    """Whether clients may not send to it."""
    return name in _SYSTEM
