"""Clocks: time is an argument everywhere, so that tests can turn it by hand."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from typing_extensions import override

#: Maximum time of a wait without a look at the clock.
_LOOK_AGAIN_S: Final = 10.0


class Clock(Protocol):
    """A clock in milliseconds since 1970 UTC."""

    def now_ms(self) -> int:
        """Return the present time."""
        ...

    def wait_until(self, condition: threading.Condition, at_ms: int | None) -> None:
        """Wait, with the condition held, until it is notified or ``at_ms`` has come."""
        ...

    def ahead_ms(self) -> int:
        """Return how far this clock is ahead of the machine's wall clock; negative: behind it."""
        ...

    def go_on_from(self, at_ms: int) -> None:
        """Never return a time before ``at_ms``, which was stored as the present time."""
        ...

    def mark(self) -> "Line | None":
        """Return how this clock follows a monotonic one now; None: it does not follow one."""
        ...

    def go_on_with(self, mark: "Line", *, last_at_ms: int) -> None:
        """Continue from the ``mark`` of an earlier process.

        Args:
            mark: from the earlier process.
            last_at_ms: the last time that was stored as the present one.
        """
        ...


@dataclass(frozen=True, slots=True)
class Line:
    """Time as a function of a monotonic clock, between two looks at the wall clock."""

    now_ns: int
    boot_ns: int
    #: Rate relative to the monotonic clock: positive is faster, in millionths.
    faster_ppm: int
    #: The wall clock minus this time, at the last look.
    gap_ns: int

    def at(self, boot_ns: int) -> int:
        """Return the time at a reading of the monotonic clock, in ns."""
        elapsed = boot_ns - self.boot_ns
        if self.faster_ppm:
            # After a long gap, such as a suspended machine, do not correct beyond the wall clock.
            most = abs(self.gap_ns)
            elapsed += max(-most, min(most, elapsed * self.faster_ppm // 1_000_000))
        return self.now_ns + elapsed


class SystemClock:
    """The machine's wall clock."""

    def now_ms(self) -> int:
        """Return the present time."""
        return self._now_ns() // 1_000_000

    def wait_until(self, condition: threading.Condition, at_ms: int | None) -> None:
        """Wait until notified or this clock has reached ``at_ms``."""
        if at_ms is None:
            condition.wait()
            return
        # No notification comes when a clock is set or a suspended machine resumes: look again.
        while (remaining_ns := at_ms * 1_000_000 - self._now_ns()) > 0:
            # A wait may end slightly early, so add half a millisecond.
            if condition.wait(min(remaining_ns / 1e9 + 0.0005, _LOOK_AGAIN_S)):
                return

    def ahead_ms(self) -> int:
        """Return 0: this is the wall clock."""
        return 0

    def go_on_from(self, at_ms: int) -> None:
        """Ignore it; the wall clock cannot be moved."""

    def mark(self) -> Line | None:
        """Return None: the wall clock follows no other clock."""
        return None

    def go_on_with(self, mark: Line, *, last_at_ms: int) -> None:
        """Ignore it; the wall clock cannot be moved."""

    def _now_ns(self) -> int:
        return time.time_ns()


class SteadyClock(SystemClock):
    """A monotonic clock that starts at the wall clock's time and ignores later changes of it."""

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
        """Return the present time."""
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

    def ahead_ms(self) -> int:
        """Return 0."""
        return 0

    def go_on_from(self, at_ms: int) -> None:
        """Ignore it; the clock moves only by ``advance``."""

    def mark(self) -> Line | None:
        """Return None."""
        return None

    def go_on_with(self, mark: Line, *, last_at_ms: int) -> None:
        """Ignore it; the clock moves only by ``advance``."""

    def advance(self, milliseconds: int) -> None:
        """Move time forward, and wake the waiters whose time has come."""
        with self._lock:
            self._now_ms += milliseconds
            due = [c for c, at in self._waiting.values() if at is not None and at <= self._now_ms]
        for condition in due:
            with condition:
                condition.notify_all()


class Deadline:
    """The end of a wait, measured by the machine's monotonic clock.

    Time limits of calls use it instead of a Clock: they must end while a manual clock stands still.
    """

    __slots__ = ("_at_s",)

    def __init__(self, seconds: float) -> None:
        self._at_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; 0 when it is over."""
        return max(0.0, self._at_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        """True from the deadline on."""
        return time.monotonic() >= self._at_s


def wait_for(
    clock: Clock, condition: threading.Condition, *, ready: Callable[[], bool], at_ms: int | None
) -> bool:
    """Wait, with the condition held, until ``ready()`` or ``at_ms``; return False at ``at_ms``."""
    while not ready():
        if at_ms is not None and clock.now_ms() >= at_ms:
            return False
        clock.wait_until(condition, at_ms)
    return True
