"""Lines of waiting receives: a message wakes one thread, not all that wait."""

import threading
from collections import deque
from collections.abc import Hashable, Mapping
from itertools import count
from typing import NamedTuple, TypeAlias

from rmq_pipeline.broker.work.arrivals import Arrivals, Rung
from rmq_pipeline.clock import Clock, wait_for

#: Waiting receives that a receive wakes after it got messages. The next one sees when these
#: messages become visible again. It also takes what the first could not: messages of queues that
#: the first found locked, or that a rate limit held back.
FOLLOWERS = 1
#: Receives that a full one wakes, because it left messages behind. With two each time, a burst
#: reaches all waiting receives soon, and a frame carries several receives.
FOLLOWERS_OF_FULL = 2


class Place(NamedTuple):
    """Key of a line: receives with the same key can get the same messages."""

    topic_id: int
    group_id: int
    #: Filter and queues; for lite topics the client too.
    who: Hashable


_Line: TypeAlias = "deque[Waiter]"


class Lines:
    """Receives that wait, each in its own thread, by place; the longest wait comes first.

    A message goes to one receive of a consumer group. Waking all of them costs one request each:
    with 2,000 waiting, nearly all of these find nothing.
    """

    def __init__(self, arrivals: Arrivals, clock: Clock) -> None:
        self._arrivals = arrivals
        self.clock = clock
        self._lock = threading.Lock()
        self._topics: dict[int, dict[Place, _Line]] = {}
        #: Numbers entries into lines and wakeups, so that a wakeup reaches a receive at most once.
        self._serial = count()
        arrivals.listen(self._rung)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(line) for of in self._topics.values() for line in of.values())

    def enter(self, place: Place) -> "Waiter":
        """Enter a line. Call it before the first look, and end the returned waiter."""
        return Waiter(self, place)

    @property
    def closed(self) -> bool:
        """True if receives must stop waiting."""
        return self._arrivals.closed

    def put(self, waiter: "Waiter") -> int | None:
        """Append a receive to its line unless it is in it.

        Return the wakeup that removed it, if any.
        """
        with self._lock:
            if waiter.entered is not None:
                return None
            woken, waiter.wakeup = waiter.wakeup, None
            waiter.entered = next(self._serial)
            places = self._topics.setdefault(waiter.place.topic_id, {})
            places.setdefault(waiter.place, deque()).append(waiter)
            return woken

    def take_out(self, waiter: "Waiter") -> None:
        """Remove a receive from its line, if it is in it."""
        with self._lock:
            if waiter.entered is None:
                return
            waiter.entered = None
            places = self._topics[waiter.place.topic_id]
            line = places[waiter.place]
            line.remove(waiter)
            self._forget_empty(waiter.place)

    def wake(self, place: Place, wakeup: int | None = None) -> None:
        """Wake the first of a line; with ``wakeup``, only if that wakeup has not reached it yet."""
        with self._lock:
            line = self._topics.get(place.topic_id, {}).get(place)
            if not line or (wakeup is not None and (line[0].entered or 0) > wakeup):
                return
            waiter = line.popleft()
            self._forget_empty(place)
            waiter.entered = None
            waiter.wakeup = next(self._serial) if wakeup is None else wakeup
        with waiter.condition:
            waiter.condition.notify()

    def _forget_empty(self, place: Place) -> None:
        places = self._topics[place.topic_id]
        if not places[place]:
            del places[place]
            if not places:
                del self._topics[place.topic_id]

    def _rung(self, rung: Rung) -> None:
        """Wake one receive of each place that a frame concerns; the writer's thread calls this."""
        if not rung:
            self._wake_all()
            return
        with self._lock:
            found = [place for topic_id in rung for place in self._topics.get(topic_id, ())]
        for place in found:
            if _concerns(rung, place):
                self.wake(place)

    def _wake_all(self) -> None:
        with self._lock:
            places = [(p, len(line)) for of in self._topics.values() for p, line in of.items()]
        for place, n in places:
            for _ in range(n):
                self.wake(place)


class Waiter:
    """One receive in its line; used by its own thread only."""

    def __init__(self, lines: Lines, place: Place) -> None:
        self._lines = lines
        self.place = place
        self.condition = threading.Condition(threading.Lock())
        #: Number of its entry into the line; None: it is not in the line.
        self.entered: int | None = None
        #: Number of its last wakeup, until it is in the line again.
        self.wakeup: int | None = None
        self._answered: int | None = None
        lines.put(self)

    def wait(self, at_ms: int) -> bool:
        """Wait until woken or until ``at_ms``; return True if woken.

        A woken receive is at the end of the line afterwards; after a timeout its place is
        unchanged.
        """
        with self.condition:
            wait_for(self._lines.clock, self.condition, ready=self._is_called, at_ms=at_ms)
        self._answered = self._lines.put(self)
        return self._answered is not None or self._lines.closed

    def pass_on(self) -> None:
        """Pass the last wakeup on to a receive it has not reached: it brought nothing here."""
        if self._answered is not None:
            self._lines.wake(self.place, self._answered)
            self._answered = None

    def end(self, followers: int) -> None:
        """Leave the line and wake the next ``followers`` receives.

        Wake at least one if this one was woken meanwhile.
        """
        self._lines.take_out(self)
        for _ in range(max(followers, int(self.wakeup is not None))):
            self._lines.wake(self.place)

    def _is_called(self) -> bool:
        return self.wakeup is not None or self._lines.closed


def _concerns(rung: Mapping[int, object], place: Place) -> bool:
    groups = rung[place.topic_id]
    return groups is None or place.group_id in groups  # type: ignore[operator]
