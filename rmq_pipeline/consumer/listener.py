"""What a listener is given beside its messages, and what it may answer (semantics §6.8, §6.9)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final

from rmq_pipeline import limits
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage

#: ack_index of a listener that says nothing: all of them.
ALL: Final = (1 << 31) - 1
#: How long a queue is suspended at least and at most, and when nobody says.
SUSPEND_MIN_MS: Final = 10
SUSPEND_MAX_MS: Final = 30_000
SUSPEND_MS: Final = 1_000


class Result(StrEnum):
    """What a listener says of its messages; None, or an exception, is LATER or SUSPEND."""

    SUCCESS = "success"
    #: Concurrently and by key: they failed, and come again.
    LATER = "reconsume_later"
    #: In order: they failed, and come again, and nothing else of the queue (of the key) before.
    SUSPEND = "suspend"
    #: By queue without auto_commit: all messages since the last commit are done.
    COMMIT = "commit"
    #: By queue without auto_commit: all messages since the last commit come again.
    ROLLBACK = "rollback"


@dataclass(slots=True)
class ConcurrentContext:
    """What a listener may say of a call, concurrently."""

    queue: MessageQueue
    #: On success: the last of its messages that is done; those behind it have failed.
    ack_index: int = ALL
    #: Of those that failed. 0: the group's backoff; -1: to the dead letters now; else delay level.
    delay_level_when_next_consume: int = 0


@dataclass(slots=True)
class OrderlyContext:
    """What a listener may say of a call, in the order of a queue."""

    queue: MessageQueue
    #: Whether success settles; without it only COMMIT does.
    auto_commit: bool = True
    #: How long to wait before the next call, when this one fails; None: the consumer's setting.
    suspend_ms: int | None = None


@dataclass(slots=True)
class KeyContext:
    """What a listener may say of a call, in the order of a key."""

    queue: MessageQueue
    #: What its messages have in common; None: nothing, and they are in no order.
    key: Any
    #: On success: the last of its messages that is done; those behind it have failed.
    ack_index: int = ALL
    #: How long to wait before the next call, when this one fails; None: the consumer's setting.
    suspend_ms: int | None = None


Context = ConcurrentContext | OrderlyContext | KeyContext
#: What a listener may set there, all of them whole numbers; None is what it was before.
_NUMBERS: Final = frozenset({"ack_index", "delay_level_when_next_consume", "suspend_ms"})
#: Called with one or more messages of one queue.
Listener = Callable[[Sequence[ReceivedMessage], Any], Result | str | None]


def checked(context: Context) -> TypeError | None:
    """What a listener has set that is no number, if it has; as if it had said nothing, then."""
    wrong: TypeError | None = None
    for field in fields(context):
        said = getattr(context, field.name)
        if field.name in _NUMBERS and not _is_number(said, field.default):
            wrong = TypeError(f"the listener set {field.name} to {shown(said)}: set a whole number")
            setattr(context, field.name, field.default)
    return wrong


def _is_number(said: object, default: object) -> bool:
    """Whether it is a whole number, or what it was before."""
    try:
        return isinstance(said, int) or bool(said == default)
    except Exception:  # noqa: BLE001 - anybody's object may refuse to be compared
        return False


def shown(said: object) -> str:
    """How an error shows what a listener said."""
    try:
        return repr(said)
    except Exception:  # noqa: BLE001 - the repr() of anybody's object may raise anything
        return f"a thing of type {type(said).__name__}"


def done_of(result: Result, *, ack_index: int, count: int) -> int:
    """How many of ``count`` messages are done, from the first on."""
    if result is not Result.SUCCESS:
        return 0
    return max(0, min(ack_index, count - 1) + 1)


def suspension_ms(asked_ms: int | None, *, usual_ms: int = SUSPEND_MS) -> int:
    """How long to wait after a failure in order: what was asked for, within bounds."""
    return max(SUSPEND_MIN_MS, min(usual_ms if asked_ms is None else asked_ms, SUSPEND_MAX_MS))


@dataclass(frozen=True, slots=True)
class Again:
    """What is to become of messages that failed."""

    #: retry, dead_letter, or give_up: the last failure, the group says what becomes of them.
    outcome: str
    #: None: the group's backoff.
    retry_after_ms: int | None = None


def again(delay_level: int) -> Again:
    """What ``delay_level_when_next_consume`` asks for; a level beyond the last is the last."""
    if delay_level < 0:
        return Again("dead_letter")
    if delay_level == 0:
        return Again("retry")
    levels = limits.DELAY_LEVELS_MS
    return Again("retry", levels[min(delay_level, len(levels)) - 1])
