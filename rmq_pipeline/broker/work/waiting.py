"""Waiting: the wakeups of a frame, the calls that wait for them, and callers that go meanwhile.

All long polls wait here. A receive or a poll of an event loop enters a line; a wakeup wakes the
first call of each line. A call that takes nothing from others waits for any change of its topic
(``LongPoll``).

An endpoint calls a verb inside ``watching``. A verb that waits wakes at ``look_at_ms`` at the
latest. It ends without taking anything once ``waits_no_more`` returns True. Callers in this process
never go away.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Final, NamedTuple, TypeAlias

from rmq_pipeline.clock import Clock, wait_for

#: By topic_id, the consumer groups for which messages may have become visible; None: all groups.
Changes: TypeAlias = Mapping[int, Collection[int] | None]

#: Waiting receives that a receive wakes after it got messages. The next one sees when these
#: messages become visible again. It also takes what the first could not: messages of queues that
#: the first found locked, or that a rate limit held back.
FOLLOWERS: Final = 1
#: Receives that a full one wakes, because it left messages behind. With two each time, a burst
#: reaches all waiting receives soon, and a frame carries several receives.
FOLLOWERS_OF_FULL: Final = 2
#: Time between two checks for the caller.
LOOK_MS: Final = 1_000


class Place(NamedTuple):
    """Key of a line: calls with the same key can get the same messages."""

    topic_id: int
    #: 0: the call waits for new messages only.
    group_id: int
    #: Filter and queues; for lite topics the client too.
    who: Hashable


class _Topic:
    """Changes of one topic, for calls that wait for any of them."""

    __slots__ = ("condition", "version")

    def __init__(self) -> None:
        self.condition = threading.Condition(threading.Lock())
        self.version = 0


_Listener: TypeAlias = tuple[int | None, Callable[[Changes], None]]
_Line: TypeAlias = "deque[Waiter]"


class Wakeups:
    """Wakeups by topic, sent when something in it may have become visible; safe for all threads.

    A message goes to one receive of a consumer group. So a wakeup wakes one call of each line, the
    one that has waited longest. Waking all of them costs one request each: with 2,000 waiting,
    nearly all of these find nothing.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._topics: dict[int, _Topic] = {}
        self._lines: dict[int, dict[Place, _Line]] = {}
        self._lock = threading.Lock()
        #: Numbers entries into lines and wakeups, so that a wakeup reaches a receive at most once.
        self._serial = count()
        self._listeners: tuple[_Listener, ...] = ()
        self._closed = False

    def __len__(self) -> int:
        with self._lock:
            return sum(len(line) for of in self._lines.values() for line in of.values())

    # ------------------------------------------------------------------------------------ wakeups

    def send(self, changes: Changes) -> None:
        """Wake the calls that wait for these topics and groups."""
        for topic in filter(None, map(self._topics.get, changes)):
            with topic.condition:
                topic.version += 1
                topic.condition.notify_all()
        # Without the lock: a call enters its line before it looks, so a later one sees the change.
        if self._lines:
            self._wake_lines(changes)
        for of_topic, listener in self._listeners if changes else ():
            if of_topic is None or of_topic in changes:
                listener(changes)

    def forget(self, topic_ids: Iterable[int]) -> None:
        """Forget deleted topics, after the wakeups of their deletion."""
        for topic_id in topic_ids:
            self._topics.pop(topic_id, None)

    def listen(
        self, listener: Callable[[Changes], None], *, topic_id: int | None = None
    ) -> Callable[[], None]:
        """Call a listener with all wakeups of a frame; return a function that removes it.

        The writer's thread calls the listener, after the waiting calls. The listener must only
        record the wakeups and return. When the broker closes, it gets an empty mapping.

        Args:
            listener: gets the topics and groups.
            topic_id: only frames that wake this topic; None: all.
        """
        entry: _Listener = (topic_id, listener)

        def end() -> None:
            with self._lock:
                self._listeners = tuple(one for one in self._listeners if one is not entry)

        with self._lock:
            self._listeners = (*self._listeners, entry)
        return end

    @property
    def closed(self) -> bool:
        """True while the broker closes: calls must stop waiting."""
        return self._closed

    def close(self) -> None:
        """Wake all waiting calls, and let no later call wait."""
        self._closed = True
        self.send(dict.fromkeys(list(self._topics)))
        with self._lock:
            lines = [(p, len(line)) for of in self._lines.values() for p, line in of.items()]
        for place, n in lines:
            for _ in range(n):
                self.wake(place)
        for _, listener in self._listeners:
            listener({})

    # ------------------------------------------------------------------- waiting for any change

    def version(self, topic_id: int) -> int:
        """Return the topic's version.

        Read it before looking: ``wait`` returns at once if the version has changed since.
        """
        found = self._topics.get(topic_id)
        if found is None:
            with self._lock:
                found = self._topics.setdefault(topic_id, _Topic())
        return found.version

    def wait(self, topic_id: int, version: int, *, at_ms: int | None) -> None:
        """Wait until the topic's version differs from ``version``, or until ``at_ms``."""
        topic = self._topics.get(topic_id)
        if topic is None:  # deleted since its version was read
            return
        with topic.condition:
            if topic.version == version and not self._closed:
                self.clock.wait_until(topic.condition, at_ms)

    # --------------------------------------------------------------------------- waiting in line

    def put(self, waiter: "Waiter") -> int | None:
        """Append a call to its line unless it is in it.

        Return the wakeup that removed it, if any.
        """
        with self._lock:
            if waiter.entered is not None:
                return None
            woken, waiter.wakeup = waiter.wakeup, None
            waiter.entered = next(self._serial)
            lines = self._lines.setdefault(waiter.place.topic_id, {})
            lines.setdefault(waiter.place, deque()).append(waiter)
            return woken

    def take_out(self, waiter: "Waiter") -> None:
        """Remove a call from its line, if it is in it."""
        with self._lock:
            if waiter.entered is None:
                return
            waiter.entered = None
            self._lines[waiter.place.topic_id][waiter.place].remove(waiter)
            self._forget_empty(waiter.place)

    def wake(self, place: Place, wakeup: int | None = None) -> None:
        """Wake the first of a line; with ``wakeup``, only if that wakeup has not reached it yet."""
        with self._lock:
            line = self._lines.get(place.topic_id, {}).get(place)
            if not line or (wakeup is not None and (line[0].entered or 0) > wakeup):
                return
            waiter = line.popleft()
            self._forget_empty(place)
            waiter.entered = None
            waiter.wakeup = next(self._serial) if wakeup is None else wakeup
        waiter.notify()

    def _wake_lines(self, changes: Changes) -> None:
        """Wake one call of each line that the changes concern."""
        with self._lock:
            found = [
                place
                for topic_id, groups in changes.items()
                for place in self._lines.get(topic_id, ())
                if groups is None or place.group_id in groups
            ]
        for place in found:
            self.wake(place)

    def _forget_empty(self, place: Place) -> None:
        lines = self._lines[place.topic_id]
        if not lines[place]:
            del lines[place]
            if not lines:
                del self._lines[place.topic_id]


class Waiter:
    """One call in its line; used by its own thread only."""

    def __init__(self, wakeups: Wakeups, place: Place) -> None:
        """Enter a line. Create it before the first look, and ``end`` it."""
        self._wakeups = wakeups
        self.place = place
        self._condition = threading.Condition(threading.Lock())
        #: Number of its entry into the line; None: it is not in the line.
        self.entered: int | None = None
        #: Number of its last wakeup, until it is in the line again.
        self.wakeup: int | None = None
        self._answered: int | None = None
        wakeups.put(self)

    def notify(self) -> None:
        """Wake the call; its ``wakeup`` is set."""
        with self._condition:
            self._condition.notify()

    def wait(self, at_ms: int) -> bool:
        """Wait until woken or until ``at_ms``; return True if woken.

        A woken call is at the end of the line afterwards; after a timeout its place is unchanged.
        """
        with self._condition:
            wait_for(self._wakeups.clock, self._condition, ready=self.is_called, at_ms=at_ms)
        return self.again()

    def is_called(self) -> bool:
        """Return True if it must not wait: it was woken, or the broker closes."""
        return self.wakeup is not None or self._wakeups.closed

    def again(self) -> bool:
        """Enter the line again after a wait; return True if the call was woken."""
        self._answered = self._wakeups.put(self)
        return self._answered is not None or self._wakeups.closed

    def pass_on(self) -> None:
        """Pass the last wakeup on to a call it has not reached: it brought nothing here."""
        if self._answered is not None:
            self._wakeups.wake(self.place, self._answered)
            self._answered = None

    def end(self, followers: int) -> None:
        """Leave the line and wake the next ``followers`` calls.

        Wake at least one if this one was woken meanwhile.
        """
        self._wakeups.take_out(self)
        for _ in range(max(followers, int(self.wakeup is not None))):
            self._wakeups.wake(self.place)


class LongPoll:
    """A call that looks at a topic, waits for a change, and looks again until its time is over."""

    def __init__(self, wakeups: Wakeups, *, wait_ms: int) -> None:
        self._wakeups = wakeups
        self._deadline_ms = wakeups.clock.now_ms() + wait_ms
        self._topic_id = self._version = self._now_ms = 0

    def look(self, topic_id: int) -> int:
        """Begin a look and return its time. A later change ends the next wait at once."""
        self._topic_id, self._version = topic_id, self._wakeups.version(topic_id)
        self._now_ms = self._wakeups.clock.now_ms()
        return self._now_ms

    @property
    def is_over(self) -> bool:
        """True if this look is the last: it began at the deadline, or the call must not wait.

        The time is from before the look: what becomes due during a look gets another one.
        """
        return self._now_ms >= self._deadline_ms or self._wakeups.closed or waits_no_more()

    def wait(self, *, until_ms: int | None = None) -> None:
        """Wait for a change since the look began, at most until ``until_ms`` or the deadline."""
        at_ms = self._deadline_ms if until_ms is None else min(self._deadline_ms, until_ms)
        at_ms = look_at_ms(self._wakeups.clock, at_ms)
        self._wakeups.wait(self._topic_id, self._version, at_ms=at_ms)


# --------------------------------------------------------------------------- callers that may go


class _Watched(NamedTuple):
    is_gone: Callable[[], bool]
    is_closing: Callable[[], bool]


_watched: ContextVar[_Watched | None] = ContextVar("watched", default=None)


@contextmanager
def watching(
    is_gone: Callable[[], bool], *, is_closing: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Let verbs that wait in this block end early.

    Args:
        is_gone: returns True once the connection of the caller is lost.
        is_closing: returns True once the endpoint stops; its callers are still there.
    """
    token = _watched.set(_Watched(is_gone, is_closing))
    try:
        yield
    finally:
        _watched.reset(token)


def is_gone() -> bool:
    """Return True if the connection of the running verb's caller is lost."""
    watched = _watched.get()
    return watched is not None and watched.is_gone()


def caller() -> Callable[[], bool]:
    """Return a function for other threads: True once the caller of the running verb has gone."""
    watched = _watched.get()
    return watched.is_gone if watched is not None else lambda: False


def waits_no_more() -> bool:
    """Return True if the running verb must not wait any longer, nor take anything."""
    watched = _watched.get()
    return watched is not None and (watched.is_closing() or watched.is_gone())


def look_at_ms(clock: Clock, at_ms: int) -> int:
    """Return the time until which a verb may wait that would wait until ``at_ms``."""
    return at_ms if _watched.get() is None else min(at_ms, clock.now_ms() + LOOK_MS)
