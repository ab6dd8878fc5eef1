"""Calling the listener: what it answers, what it takes, who is told (semantics §6.8)."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from rmq_pipeline.consumer.hooks import Call, Hooks, Status
from rmq_pipeline.consumer.listener import Context, Listener, Result, checked, shown
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.text import said_by

log = logging.getLogger(__name__)

#: What a failed call is recorded as, when the listener raised nothing.
_SAID: Final = {
    Status.RETURNED_NONE: "the listener returned None",
    Status.FAILED: "the listener asked for it again",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call of the listener came to."""

    result: Result
    status: Status
    took_ms: float
    error: BaseException | None = None

    @property
    def reason(self) -> str:
        """Why it failed, as the broker keeps it."""
        if self.error is not None:
            return said_by(self.error) or type(self.error).__name__
        return _SAID.get(self.status, "the listener took too long")

    @property
    def error_type(self) -> str:
        """The class of the error, or of the refusal."""
        return type(self.error).__name__ if self.error is not None else self.status.value


class Calling:
    """Calls a listener, with hooks around it; whatever it raises is an answer."""

    def __init__(
        self,
        listener: Listener,
        *,
        group: str,
        hooks: Hooks,
        failed: Result,
        timeout_ms: int,
    ) -> None:
        """Call nothing yet.

        Args:
            failed: what None and exceptions stand for: LATER or SUSPEND.
            timeout_ms: a call that takes as long is told to hooks as timed out.
        """
        self._listener, self._group, self._hooks = listener, group, hooks
        self._failed, self._timeout_ms = failed, timeout_ms

    def __call__(self, messages: Sequence[ReceivedMessage], context: Context) -> Answer:
        """One call."""
        call = None
        if self._hooks:
            call = Call(self._group, context.queue, messages)
            self._hooks.before(call)
        began = time.perf_counter()
        error: BaseException | None = None
        said: Result | str | None = None
        try:
            said = self._listener(messages, context)
        except BaseException as raised:  # noqa: BLE001 - even sys.exit: these messages have failed
            error = raised
        took_ms = (time.perf_counter() - began) * 1000
        error = checked(context) or error
        answer = self._understood(said, error, took_ms=took_ms)
        if answer.status is not Status.SUCCESS:
            self._tell(messages, answer)
        if call is not None:
            self._hooks.after(replace(call, status=answer.status, error=error, took_ms=took_ms))
        return answer

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
