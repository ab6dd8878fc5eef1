"""Contexts and results of a listener (semantics §6.8, §6.9)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final

from rmq_pipeline import limits
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage

#: Default ack_index: all messages succeeded.
ALL: Final = (1 << 31) - 1
#: Minimum, maximum and default suspension of a queue.
SUSPEND_MIN_MS: Final = 10
SUSPEND_MAX_MS: Final = 30_000
SUSPEND_MS: Final = 1_000


class Result(StrEnum):
    """Result of a listener; None or an exception means LATER or SUSPEND."""

    SUCCESS = "success"
    #: Orders "concurrently" and "key": the messages failed and are redelivered.
    LATER = "reconsume_later"
    #: Ordered: the messages failed and are redelivered before any other of the queue or key.
    SUSPEND = "suspend"
    #: Order "queue" without auto_commit: all messages since the last commit are done.
    COMMIT = "commit"
    #: Order "queue" without auto_commit: all messages since the last commit are redelivered.
    ROLLBACK = "rollback"


@dataclass(slots=True)
class ConcurrentContext:
    """Context of a call without order; the listener may set its fields."""

    queue: MessageQueue
    #: On success: index of the last message that succeeded; the later messages failed.
    ack_index: int = ALL
    #: For failed messages. 0: the group's backoff; -1: dead-letter now; else a delay level.
    delay_level_when_next_consume: int = 0


@dataclass(slots=True)
class OrderlyContext:
    """Context of a call in the order of a queue; the listener may set its fields."""

    queue: MessageQueue
    #: True: SUCCESS settles the messages. False: only COMMIT does.
    auto_commit: bool = True
    #: Pause in ms before the next call if this one fails; None, or RocketMQ's -1: the consumer's
    #: setting.
    suspend_ms: int | None = None


@dataclass(slots=True)
class KeyContext:
    """Context of a call in the order of a key; the listener may set its fields."""

    queue: MessageQueue
    #: Key of the messages; None: they have no key and no order.
    key: Any
    #: On success: index of the last message that succeeded; the later messages failed.
    ack_index: int = ALL
    #: Pause in ms before the next call if this one fails; None or -1: the consumer's setting, or
    #: the group's backoff.
    suspend_ms: int | None = None


Context = ConcurrentContext | OrderlyContext | KeyContext
#: Integer fields that a listener may set.
_NUMBERS: Final = frozenset({"ack_index", "delay_level_when_next_consume", "suspend_ms"})
#: Called with one or more messages of one queue.
Listener = Callable[[Sequence[ReceivedMessage], Any], Result | str | None]


def checked(context: Context) -> TypeError | None:
    """Reset fields that the listener set to a non-integer; return the error for the last one."""
    wrong: TypeError | None = None
    for field in fields(context):
        said = getattr(context, field.name)
        if field.name in _NUMBERS and not _is_number(said, field.default):
            wrong = TypeError(f"the listener set {field.name} to {shown(said)}: set a whole number")
            setattr(context, field.name, field.default)
    return wrong


def _is_number(said: object, default: object) -> bool:
    """Return True for an integer or the default."""
    try:
        return isinstance(said, int) or bool(said == default)
    except Exception:  # noqa: BLE001 - the comparison of a user's object may raise
        return False


def shown(said: object) -> str:
    """Return the repr of a listener's value for an error message."""
    try:
        return repr(said)
    except Exception:  # noqa: BLE001 - the repr of a user's object may raise
        return f"a thing of type {type(said).__name__}"


def done_of(result: Result, *, ack_index: int, count: int) -> int:
    """Return how many of ``count`` messages succeeded, counted from the first."""
    if result is not Result.SUCCESS:
        return 0
    return max(0, min(ack_index, count - 1) + 1)


def suspension_ms(asked_ms: int | None, *, usual_ms: int = SUSPEND_MS) -> int:
    """Return the pause after a failure in order, within the bounds.

    None and negative values, such as RocketMQ's -1, mean ``usual_ms``.
    """
    wanted = usual_ms if asked_ms is None or asked_ms < 0 else asked_ms
    return max(SUSPEND_MIN_MS, min(wanted, SUSPEND_MAX_MS))


@dataclass(frozen=True, slots=True)
class Again:
    """Outcome of failed messages."""

    #: "retry", "dead_letter", or "give_up" (the last failure; the group's on_failure applies).
    outcome: str
    #: Delay of the retry; None: the group's backoff.
    retry_after_ms: int | None = None


def again(delay_level: int) -> Again:
    """Return the outcome for a ``delay_level_when_next_consume``; higher levels mean the last."""
    if delay_level < 0:
        return Again("dead_letter")
    if delay_level == 0:
        return Again("retry")
    levels = limits.DELAY_LEVELS_MS
    return Again("retry", levels[min(delay_level, len(levels)) - 1])
