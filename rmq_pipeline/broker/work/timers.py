"""Timers on the broker's clock: calls that one thread makes at their time."""

import heapq
import logging
import threading
from collections.abc import Callable
from itertools import count
from typing import Final

from rmq_pipeline.clock import Clock

log = logging.getLogger(__name__)

#: Pause after an unexpected error, so that a persistent one does not spin.
_PAUSE_S: Final = 0.1


class Timer:
    """A call that is made at its time unless it is cancelled."""

    __slots__ = ("_call", "at_ms")

    def __init__(self, at_ms: int, call: Callable[[], None]) -> None:
        self.at_ms = at_ms
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Drop the call. If the thread has already taken it, it may still run."""
        self._call = None

    def fire(self) -> None:
        """Make the call once; log an error, so that the other timers still run."""
        call, self._call = self._call, None
        if call is None:
            return
        try:
            call()
        except Exception:
            log.exception("A timer's call failed.")


class Timers:
    """Timer thread that calls functions at their time by the broker's clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._condition = threading.Condition()
        self._waiting: list[tuple[int, int, Timer]] = []
        self._serial = count()
        self._closed = False
        self._pause = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rmq-timers", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Make no further calls, and join the thread."""
        with self._condition:
            self._closed = True
            self._pause.set()
            self._condition.notify_all()
        self._thread.join()

    def at(self, at_ms: int, call: Callable[[], None]) -> Timer:
        """Call a function once ``at_ms`` has come; it must hand over its work and return."""
        timer = Timer(at_ms, call)
        with self._condition:
            heapq.heappush(self._waiting, (at_ms, next(self._serial), timer))
            if self._waiting[0][2] is timer:
                self._condition.notify_all()
        return timer

    def _run(self) -> None:
        while not self._closed:
            try:
                due = self._next()
            except Exception:  # without this thread no poll ends and no lease is renewed
                log.exception("The timer thread failed; it continues.")
                self._pause.wait(_PAUSE_S)
                continue
            for timer in due:
                timer.fire()

    def _next(self) -> list[Timer]:
        """Wait for the next due timers and return them; an empty list after ``close``."""
        with self._condition:
            while not self._closed:
                now_ms, due = self._clock.now_ms(), []
                while self._waiting and self._waiting[0][0] <= now_ms:
                    due.append(heapq.heappop(self._waiting)[2])
                if due:
                    return due
                first = self._waiting[0][0] if self._waiting else None
                self._clock.wait_until(self._condition, first)
        return []
