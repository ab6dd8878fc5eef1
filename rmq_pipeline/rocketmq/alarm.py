"""Moments that something waits for, of long polls and leases: one thread for all of them."""

import heapq
import logging
import threading
from collections.abc import Callable
from itertools import count

from rmq_pipeline.clock import Clock

log = logging.getLogger(__name__)


class Moment:
    """A call that is made when its time has come, unless it was cancelled."""

    __slots__ = ("_call", "at_ms")

    def __init__(self, at_ms: int, call: Callable[[], None]) -> None:
        self.at_ms = at_ms
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Forget the call; whether it was made is not known."""
        self._call = None

    def ring(self) -> None:
        """Make the call; an error of it is nobody else's."""
        call, self._call = self._call, None
        if call is None:
            return
        try:
            call()
        except Exception:
            log.exception("A call at its time has failed.")


class Alarm:
    """Calls functions at their time by the broker's clock, from a thread of its own."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._condition = threading.Condition()
        self._moments: list[tuple[int, int, Moment]] = []
        self._serial = count()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rmq-alarm", daemon=True)

    def start(self) -> None:
        """Begin to call."""
        self._thread.start()

    def close(self) -> None:
        """Call nothing more."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    def at(self, at_ms: int, call: Callable[[], None]) -> Moment:
        """Have a function called once ``at_ms`` has come. It should hand over and return."""
        moment = Moment(at_ms, call)
        with self._condition:
            heapq.heappush(self._moments, (at_ms, next(self._serial), moment))
            if self._moments[0][2] is moment:
                self._condition.notify_all()
        return moment

    def _run(self) -> None:
        while due := self._next():
            for moment in due:
                moment.ring()

    def _next(self) -> list[Moment]:
        """Those whose time has come, at least one; nothing at the end."""
        with self._condition:
            while not self._closed:
                now_ms, due = self._clock.now_ms(), []
                while self._moments and self._moments[0][0] <= now_ms:
                    due.append(heapq.heappop(self._moments)[2])
                if due:
                    return due
                first = self._moments[0][0] if self._moments else None
                self._clock.wait_until(self._condition, first)
        return []
