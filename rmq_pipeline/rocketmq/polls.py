"""Long polls: receives that found nothing wait here, without a thread, until a wakeup."""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeAlias

from rmq_pipeline.broker.work.arrivals import Arrivals, Rung
from rmq_pipeline.errors import BrokerUnavailableError
from rmq_pipeline.rocketmq.bridge import Bridge, Timers


class Place(NamedTuple):
    """Key of a poll; polls with the same key would find the same messages."""

    topic_id: int
    #: 0: the poll waits for new messages only.
    group_id: int
    #: The filter, and the client id where it matters.
    who: Hashable


_Waiting: TypeAlias = "asyncio.Future[None]"


class Polls:
    """Waiting polls, by topic and place. Used on the event loop only.

    Each message goes to one consumer of a group, so a wakeup wakes one poll per place. A poll that
    finds messages wakes the next one, because there may be more.
    """

    def __init__(self, arrivals: Arrivals, bridge: Bridge, *, timers: Timers) -> None:
        self._arrivals = arrivals
        self._bridge = bridge
        self._timers = timers
        self._topics: dict[int, dict[Place, deque[_Waiting]]] = {}
        self._unlisten: Callable[[], None] = arrivals.listen(self._note)
        self._count = 0
        self._closed = False

    def __len__(self) -> int:
        return self._count

    @property
    def closed(self) -> bool:
        """True once the endpoint or the broker is stopping: polls must end."""
        return self._closed or self._arrivals.closed

    def check_open(self) -> None:
        """Refuse to wait any longer once the broker is stopping.

        Raises:
            BrokerUnavailableError: the broker is stopping.
        """
        if self.closed:
            raise BrokerUnavailableError("The broker is stopping.")

    def close(self) -> None:
        """Wake all polls; they do not wait again."""
        self._closed = True
        self._unlisten()
        self._wake_all()

    def watch(self, place: Place) -> "Watch":
        """Register a poll; call it before the first look, and ``end`` the result."""
        return Watch(self, place)

    def wake_one(self, place: Place) -> bool:
        """Wake the poll that has waited longest at a place; return False if none waits there."""
        queue = self._topics.get(place.topic_id, {}).get(place)
        while queue:
            waiting = queue.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return True
        return False

    def enter(self, place: Place) -> _Waiting:
        """Append a poll to the queue of a place."""
        waiting: _Waiting = asyncio.get_running_loop().create_future()
        places = self._topics.setdefault(place.topic_id, {})
        places.setdefault(place, deque()).append(waiting)
        return waiting

    def leave(self, place: Place, waiting: _Waiting) -> None:
        """Remove a poll from the queue of a place."""
        places = self._topics.get(place.topic_id, {})
        queue = places.get(place)
        if queue is None:
            return
        if waiting in queue:
            queue.remove(waiting)
        if not queue:
            del places[place]
            if not places:
                del self._topics[place.topic_id]

    async def sleep(self, waiting: _Waiting, at_ms: int) -> None:
        """Wait until the poll is woken, or until ``at_ms``."""
        timer = self._timers.at(at_ms, lambda: self._bridge.call_soon(_wake, waiting))
        self._count += 1
        try:
            await waiting
        finally:
            self._count -= 1
            timer.cancel()

    def _note(self, rung: Rung) -> None:
        """Pass the wakeups of a frame to the loop; called from the writer's thread."""
        if not rung:
            self._bridge.call_soon(self._wake_all)
        elif any(topic_id in self._topics for topic_id in rung):
            self._bridge.call_soon(self._wake_some, rung)

    def _wake_some(self, rung: Rung) -> None:
        for topic_id, groups in rung.items():
            for place in list(self._topics.get(topic_id, ())):
                if groups is None or place.group_id in groups:
                    self.wake_one(place)

    def _wake_all(self) -> None:
        for places in list(self._topics.values()):
            for place in list(places):
                while self.wake_one(place):
                    pass


class Watch:
    """Registration of one poll; a wakeup during its look is not lost."""

    def __init__(self, polls: Polls, place: Place) -> None:
        self._polls = polls
        self._place = place
        self._waiting = polls.enter(place)

    async def wait(self, at_ms: int) -> None:
        """Wait until something may have come since the last look, or until ``at_ms``."""
        if not self._waiting.done() and not self._polls.closed:
            await self._polls.sleep(self._waiting, at_ms)
        self._polls.leave(self._place, self._waiting)
        self._waiting = self._polls.enter(self._place)

    def move(self, place: Place) -> None:
        """Wait at another place from now on; call it before the first look there."""
        self._polls.leave(self._place, self._waiting)
        self._place = place
        self._waiting = self._polls.enter(place)

    def end(self) -> None:
        """Unregister the poll, and pass on a wakeup that it did not use."""
        woken = self._waiting.done() and not self._waiting.cancelled()
        self._polls.leave(self._place, self._waiting)
        if woken:
            self._polls.wake_one(self._place)


def _wake(waiting: _Waiting) -> None:
    if not waiting.done():
        waiting.set_result(None)
