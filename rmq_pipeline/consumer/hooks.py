"""Hooks around every call of a listener, for tracing and metrics; they cannot change the call."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage

log = logging.getLogger(__name__)


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
