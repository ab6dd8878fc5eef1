"""Calls of the listener: result, duration, logs and hooks (semantics §6.8)."""

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
