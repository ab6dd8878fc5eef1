"""Threads that call the listener, and the scheduler of delayed and periodic actions."""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

from rmq_pipeline.clock import Clock, Deadline

log = logging.getLogger(__name__)

#: Unit of work: one or several calls of the listener.
Turn = Callable[[], None]


class Workers:
    """Pool of threads that run turns in the order of submission.

    For each turn that lasts long, because the listener hangs, the pool adds a thread, up to
    ``most``. So a hanging call does not slow the others down.
    """

    def __init__(self, threads: int, *, most: int, stuck_after_ms: int, name: str) -> None:
        self.threads = threads
        self._most = most
        self._stuck_after_s = stuck_after_ms / 1000
        self._name = name
        self._turns: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._alive: set[threading.Thread] = set()
        #: Start time of each thread's current turn.
        self._since: dict[threading.Thread, float] = {}
        #: Number of threads with a long turn, as of the last ``look``.
        self.stuck = 0
        self._closing = False
        self._open = threading.Event()
        self._open.set()
        for _ in range(threads):
            self._start()

    def submit(self, turn: Turn) -> None:
        """Append a turn to the queue."""
        self._turns.put(turn)

    @property
    def idle(self) -> bool:
        """True if no turn waits for a worker."""
        return self._turns.empty()

    @property
    def alive(self) -> int:
        """Number of threads."""
        return len(self._alive)

    def goes_on(self) -> bool:
        """Return True if the current turn may continue with its next step.

        The call also marks the turn as not stuck.
        """
        self._since[threading.current_thread()] = time.monotonic()
        return self._open.is_set() and not self._closing

    def includes_caller(self) -> bool:
        """Return True if the calling thread belongs to the pool."""
        return threading.current_thread() in self._alive

    def hold(self) -> None:
        """Start no turn until ``go_on``."""
        self._open.clear()

    def go_on(self) -> None:
        """Start turns again after ``hold``."""
        self._open.set()

    def look(self) -> None:
        """Add threads for long turns; call it periodically."""
        long_ago = time.monotonic() - self._stuck_after_s
        with self._lock:
            self.stuck = sum(since < long_ago for since in list(self._since.values()))
            missing = min(self._most, self.threads + self.stuck) - len(self._alive)
        for _ in range(missing):
            self._start()

    def close(self, timeout_s: float) -> bool:
        """Stop the pool; return True if all running turns ended within the timeout."""
        with self._lock:
            self._closing = True
            alive = list(self._alive)
        self._open.set()
        for _ in alive:
            self._turns.put(None)
        deadline = Deadline(timeout_s)
        for thread in alive:
            # A listener may close its own consumer, so a thread does not wait for itself.
            if thread is not threading.current_thread():
                thread.join(deadline.left_s)
        own = threading.current_thread()
        return not any(thread.is_alive() for thread in alive if thread is not own)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        with self._lock:
            # ``close`` has counted the threads that it waits for, so add none afterwards.
            if not self._closing:
                self._alive.add(thread)
                thread.start()

    def _run(self) -> None:
        own: Final = threading.current_thread()
        while not self._surplus(own):
            turn = self._turns.get()
            self._open.wait()
            if turn is None or self._closing:
                break
            self._since[own] = time.monotonic()
            try:
                turn()
            except BaseException:
                log.exception("a turn of %s failed", self._name)
            finally:
                self._since.pop(own, None)
        with self._lock:
            self._alive.discard(own)

    def _surplus(self, own: threading.Thread) -> bool:
        """Return True if this thread replaced a stuck one that has recovered."""
        if len(self._alive) <= self.threads:
            return False
        with self._lock:
            if len(self._alive) <= min(self._most, self.threads + self.stuck):
                return False
            self._alive.discard(own)
            return True


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
