"""Time as an argument: the wall clock, and one that tests turn by hand."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from typing_extensions import override


class Clock(Protocol):
    """What the broker asks of time; milliseconds since 1970 UTC."""

    def now_ms(self) -> int:
        """The present."""
        ...

    def wait_until(self, condition: threading.Condition, at_ms: int | None) -> None:
        """Wait, with the condition held, until it is notified or ``at_ms`` has come."""
        ...


class SystemClock:
    """The machine's wall clock."""

    def now_ms(self) -> int:
        """The present."""
        return self._now_ns() // 1_000_000

    def wait_until(self, condition: threading.Condition, at_ms: int | None) -> None:
        """Wait until notified or this clock has reached ``at_ms``."""
        if at_ms is None:
            condition.wait()
            return
        # The clock has whole milliseconds: half of one more, so that a wake-up is never early.
        remaining_s = (at_ms * 1_000_000 - self._now_ns()) / 1e9 + 0.0005
        if remaining_s > 0:
            condition.wait(remaining_s)

    def _now_ns(self) -> int:
        return time.time_ns()


class SteadyClock(SystemClock):
    """The wall clock as it stood at first, then steadily on: nobody who sets it is followed."""

    def __init__(self) -> None:
        self._ahead_ns = time.time_ns() - time.monotonic_ns()

    @override
    def _now_ns(self) -> int:
        return time.monotonic_ns() + self._ahead_ns


class ManualClock:
    """A clock that moves only by ``advance``; waiters wake when their time has come."""

    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = start_ms
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[threading.Condition, int | None]] = {}

    def now_ms(self) -> int:
        """The present."""
        return self._now_ms

    def wait_until(self, condition: threading.Condition, at_ms: int | None) -> None:
        """Wait until notified or ``advance`` has passed ``at_ms``."""
        key = threading.get_ident()
        with self._lock:
            if at_ms is not None and at_ms <= self._now_ms:
                return
            self._waiting[key] = (condition, at_ms)
        try:
            condition.wait()
        finally:
            with self._lock:
                self._waiting.pop(key, None)

    def advance(self, milliseconds: int) -> None:
        """Move time forward and wake whoever waited for a moment that has now come."""
        with self._lock:
            self._now_ms += milliseconds
            due = [c for c, at in self._waiting.values() if at is not None and at <= self._now_ms]
        for condition in due:
            with condition:
                condition.notify_all()


def wait_for(
    clock: Clock, condition: threading.Condition, *, ready: Callable[[], bool], at_ms: int | None
) -> bool:
    """Wait, with the condition held, until ``ready()`` or ``at_ms``; the last ``ready()``."""
    while not ready():
        if at_ms is not None and clock.now_ms() >= at_ms:
            return False
        clock.wait_until(condition, at_ms)
    return True
