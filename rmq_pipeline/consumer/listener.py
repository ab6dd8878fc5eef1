"""The listener: its contexts and results, its hooks, and its calls (semantics §6.8, §6.9)."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Final, Protocol

from rmq_pipeline import limits, tracing
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.text import said_by

log = logging.getLogger(__name__)

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
        return f"a value of type {type(said).__name__}"


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


class Status(StrEnum):
    """Outcome of a call of a listener."""

    SUCCESS = "success"
    #: The listener returned a failure.
    FAILED = "failed"
    EXCEPTION = "exception"
    RETURNED_NONE = "returned_none"
    #: The call took at least the consumer's timeout.
    TIME_OUT = "time_out"


@dataclass(frozen=True, slots=True)
class Call:
    """Call of a listener, as passed to hooks."""

    group: str
    queue: MessageQueue
    messages: Sequence[ReceivedMessage]
    #: None before the call.
    status: Status | None = None
    error: BaseException | None = None
    took_ms: float = 0.0

    @property
    def succeeded(self) -> bool:
        """True if the listener succeeded, even after the timeout."""
        return self.status in (Status.SUCCESS, Status.TIME_OUT) and self.error is None


class Hook(Protocol):
    """Observer of calls; runs in the thread of the call."""

    def before(self, call: Call) -> None:
        """Observe a call before the listener runs."""
        ...

    def after(self, call: Call) -> None:
        """Observe a call after the listener has returned or raised."""
        ...


class Hooks:
    """List of hooks; an exception of a hook is logged and ignored."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self._hooks = list(hooks)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def add(self, hook: Hook) -> None:
        """Append a hook."""
        self._hooks.append(hook)

    def before(self, call: Call) -> None:
        """Run all hooks before a call."""
        for hook in self._hooks:
            _tell(hook.before, call)

    def after(self, call: Call) -> None:
        """Run all hooks after a call."""
        for hook in self._hooks:
            _tell(hook.after, call)


def _tell(hook: Callable[[Call], None], call: Call) -> None:
    try:
        hook(call)
    except BaseException:  # even SystemExit must not stop the queue of the call
        log.exception("hook %r of group %s failed", hook, call.group)


#: Recorded reason of a failed call that raised no exception.
_SAID: Final = {
    Status.RETURNED_NONE: "the listener returned None",
    Status.FAILED: "the listener asked for it again",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a call of the listener."""

    result: Result
    status: Status
    took_ms: float
    error: BaseException | None = None

    @property
    def reason(self) -> str:
        """Reason of the failure, as the broker records it."""
        if self.error is not None:
            return said_by(self.error) or type(self.error).__name__
        return _SAID.get(self.status, "the listener took too long")

    @property
    def error_type(self) -> str:
        """Class of the exception, or the status of the call."""
        return type(self.error).__name__ if self.error is not None else self.status.value


class Calling:
    """Caller of a listener, with hooks; an exception becomes an Answer."""

    def __init__(
        self,
        listener: Listener,
        *,
        group: str,
        hooks: Hooks,
        failed: Result,
        timeout_ms: int,
    ) -> None:
        """Prepare the calls.

        Args:
            failed: the result that None and exceptions mean: LATER or SUSPEND.
            timeout_ms: duration from which hooks see a call as timed out.
        """
        self._listener, self._group, self._hooks = listener, group, hooks
        self._failed, self._timeout_ms = failed, timeout_ms

    def __call__(self, messages: Sequence[ReceivedMessage], context: Context) -> Answer:
        """Call the listener once."""
        call = None
        if self._hooks:
            call = Call(self._group, context.queue, messages)
            self._hooks.before(call)
        with self._span(messages) if tracing.is_on() else tracing.NONE as span:
            answer, error = self._answer(messages, context, span=span)
        if call is not None:
            ended = replace(call, status=answer.status, error=error, took_ms=answer.took_ms)
            self._hooks.after(ended)
        return answer

    def _answer(
        self, messages: Sequence[ReceivedMessage], context: Context, *, span: tracing.Span
    ) -> tuple[Answer, BaseException | None]:
        """Return the answer of the listener, and the error that it raised."""
        began = time.perf_counter()
        error: BaseException | None = None
        said: Result | str | None = None
        try:
            with span.current():
                said = self._listener(messages, context)
        except BaseException as raised:  # noqa: BLE001 - even sys.exit: these messages have failed
            error = raised
        took_ms = (time.perf_counter() - began) * 1000
        error = checked(context) or error
        answer = self._understood(said, error, took_ms=took_ms)
        if answer.status is not Status.SUCCESS:
            span.failed(answer.error_type, answer.reason, error=answer.error)
            self._tell(messages, answer)
        return answer, error

    def _span(self, messages: Sequence[ReceivedMessage]) -> tracing.Span:
        """Begin the span of a call."""
        first = messages[0]
        attributes: dict[str, Any] = {"messaging.destination.partition.id": str(first.queue_id)}
        if len(messages) == 1:
            attributes |= {
                "messaging.message.id": first.message_id,
                "messaging.message.body.size": first.size,
                "messaging.rocketmq.message.group": first.message_group,
                "messaging.rocketmq.message.tag": first.tag,
                "messaging.rocketmq.message.keys": first.keys or None,
                "rmq.delivery_attempt": first.delivery_attempt,
            }
        return tracing.begin_call(
            first.topic,
            group=self._group,
            properties=(message.properties for message in messages),
            messages=len(messages),
            attributes=attributes,
        )

    def _understood(
        self, said: Result | str | None, error: BaseException | None, *, took_ms: float
    ) -> Answer:
        if said is Result.SUCCESS and error is None and took_ms < self._timeout_ms:
            return Answer(Result.SUCCESS, Status.SUCCESS, took_ms)
        if error is not None:
            return Answer(self._failed, Status.EXCEPTION, took_ms, error)
        try:
            result = Result(said) if said is not None else None
        except Exception:  # noqa: BLE001 - it is compared, which may raise anything
            error = TypeError(
                f"the listener returned {shown(said)}: return one of {', '.join(Result)}, or None"
            )
            return Answer(self._failed, Status.EXCEPTION, took_ms, error)
        if result is None:
            return Answer(self._failed, Status.RETURNED_NONE, took_ms)
        if took_ms >= self._timeout_ms:
            return Answer(result, Status.TIME_OUT, took_ms)
        done = result in (Result.SUCCESS, Result.COMMIT)
        return Answer(result, Status.SUCCESS if done else Status.FAILED, took_ms)

    def _tell(self, messages: Sequence[ReceivedMessage], answer: Answer) -> None:
        first = messages[0]
        said_so = answer.status in (Status.FAILED, Status.RETURNED_NONE)
        log.log(
            logging.INFO if said_so else logging.WARNING,
            "listener of group %s: %s, topic %s, queue %d, offset %d (%d messages), attempt %d: %s",
            self._group,
            answer.status.value,
            first.topic,
            first.queue_id,
            first.queue_offset,
            len(messages),
            first.delivery_attempt,
            answer.reason,
            exc_info=answer.error,
        )
