"""Hooks around every call of a listener, for tracing and metrics: they see, and change nothing."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage

log = logging.getLogger(__name__)


class Status(StrEnum):
    """How a call of a listener ended."""

    SUCCESS = "success"
    #: It said so.
    FAILED = "failed"
    EXCEPTION = "exception"
    RETURNED_NONE = "returned_none"
    #: It took as long as the consumer's timeout, or longer.
    TIME_OUT = "time_out"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a listener, as hooks are told of it."""

    group: str
    queue: MessageQueue
    messages: Sequence[ReceivedMessage]
    #: After it; None before.
    status: Status | None = None
    error: BaseException | None = None
    took_ms: float = 0.0

    @property
    def succeeded(self) -> bool:
        """Whether the listener said so, in whatever time."""
        return self.status in (Status.SUCCESS, Status.TIME_OUT) and self.error is None


class Hook(Protocol):
    """Told before and after every call, in the thread of the call."""

    def before(self, call: Call) -> None:
        """The listener is about to be called."""
        ...

    def after(self, call: Call) -> None:
        """The listener has been called."""
        ...


class Hooks:
    """Several hooks; one that raises is logged, and stops nothing."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self._hooks = list(hooks)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def add(self, hook: Hook) -> None:
        """One more, called after the others."""
        self._hooks.append(hook)

    def before(self, call: Call) -> None:
        """Tell all of them."""
        for hook in self._hooks:
            _tell(hook.before, call)

    def after(self, call: Call) -> None:
        """Tell all of them."""
        for hook in self._hooks:
            _tell(hook.after, call)


def _tell(hook: Callable[[Call], None], call: Call) -> None:
    try:
        hook(call)
    except BaseException:  # even sys.exit: the queue of the call has to go on
        log.exception("hook %r of group %s failed", hook, call.group)
