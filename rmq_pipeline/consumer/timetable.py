"""Scheduler of delayed and periodic actions, in one thread."""

import itertools
import logging
import threading
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

from rmq_pipeline.clock import Clock

log = logging.getLogger(__name__)

#: Must return quickly: all actions share one thread.
Action = Callable[[], None]


class Timetable:
    """Scheduler thread; an exception of an action is logged, and the other actions continue."""

    def __init__(self, clock: Clock, *, name: str) -> None:
        self._clock = clock
        self._due: list[tuple[int, int, Action]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: Final = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def after(self, delay_ms: int, action: Action) -> None:
        """Run an action once, ``delay_ms`` from now."""
        entry = (self._clock.now_ms() + delay_ms, next(self._numbers), action)
        with self._changed:
            heappush(self._due, entry)
            if self._due[0] is entry:
                self._changed.notify_all()

    def every(self, interval_ms: int, action: Action) -> None:
        """Run an action repeatedly, ``interval_ms`` after the end of its last run."""

        def again() -> None:
            try:
                action()
            finally:
                self.after(interval_ms, again)

        self.after(interval_ms, again)

    def close(self) -> None:
        """Stop the thread; pending actions do not run."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (action := self._next()) is not None:
            try:
                action()
            except Exception:
                log.exception("%r failed", action)

    def _next(self) -> Action | None:
        """Wait for the next due action and return it; None after ``close``."""
        with self._changed:
            while not self._closed:
                at_ms = self._due[0][0] if self._due else None
                if at_ms is not None and at_ms <= self._clock.now_ms():
                    return heappop(self._due)[2]
                # An earlier action or ``close`` also ends the wait.
                self._clock.wait_until(self._changed, at_ms)
            return None
