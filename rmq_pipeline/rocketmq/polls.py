"""Long polls: receives that found nothing wait here, without a thread, until they may try again."""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeAlias

from rmq_pipeline.broker.arrivals import Arrivals, Rung
from rmq_pipeline.rocketmq.alarm import Alarm
from rmq_pipeline.rocketmq.bridge import Bridge


class Place(NamedTuple):
    """What is waited for: polls of one place find the same."""

    topic_id: int
    #: 0: for what is new only.
    group_id: int
    #: The filter, and the client where it matters.
    who: Hashable


_Waiting: TypeAlias = "asyncio.Future[None]"


class Polls:
    """Those who wait, by topic and place. Used on the event loop only.

    A message is for one of a consumer group, so of each place one is woken; when it has found
    something there may be more, and it wakes the next.
    """

    def __init__(self, arrivals: Arrivals, bridge: Bridge, *, alarm: Alarm) -> None:
        self._arrivals = arrivals
        self._bridge = bridge
        self._alarm = alarm
        self._topics: dict[int, dict[Place, deque[_Waiting]]] = {}
        self._unlisten: Callable[[], None] = arrivals.listen(self._note)
        self._count = 0
        self._closed = False

    def __len__(self) -> int:
        return self._count

    @property
    def closed(self) -> bool:
        """Whether nobody should wait any more."""
        return self._closed or self._arrivals.closed

    def close(self) -> None:
        """Wake everybody for good."""
        self._closed = True
        self._unlisten()
        self._wake_all()

    def watch(self, place: Place) -> "Watch":
        """Hear of what comes from now on; to be called before the first look, and to be ended."""
        return Watch(self, place)

    def wake_one(self, place: Place) -> bool:
        """Wake whoever has waited longest at a place; whether anybody did."""
        queue = self._topics.get(place.topic_id, {}).get(place)
        while queue:
            waiting = queue.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return True
        return False

    def enter(self, place: Place) -> _Waiting:
        """Stand in the line of a place."""
        waiting: _Waiting = asyncio.get_running_loop().create_future()
        places = self._topics.setdefault(place.topic_id, {})
        places.setdefault(place, deque()).append(waiting)
        return waiting

    def leave(self, place: Place, waiting: _Waiting) -> None:
        """Stand there no more."""
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
        """Wait until one is woken, or until ``at_ms``."""
        moment = self._alarm.at(at_ms, lambda: self._bridge.call_soon(_wake, waiting))
        self._count += 1
        try:
            await waiting
        finally:
            self._count -= 1
            moment.cancel()

    def _note(self, rung: Rung) -> None:
        """Bells of a frame have rung; called from the writer's thread."""
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
    """One poll's ear: what comes while it looks is not missed."""

    def __init__(self, polls: Polls, place: Place) -> None:
        self._polls = polls
        self._place = place
        self._waiting = polls.enter(place)

    async def wait(self, at_ms: int) -> None:
        """Wait until something may be there that was not at the last look, or until ``at_ms``."""
        if not self._waiting.done() and not self._polls.closed:
            await self._polls.sleep(self._waiting, at_ms)
        self._polls.leave(self._place, self._waiting)
        self._waiting = self._polls.enter(self._place)

    def end(self) -> None:
        """Look no more; if it was woken for something, another is to look for it."""
        woken = self._waiting.done() and not self._waiting.cancelled()
        self._polls.leave(self._place, self._waiting)
        if woken:
            self._polls.wake_one(self._place)


def _wake(waiting: _Waiting) -> None:
    if not waiting.done():
        waiting.set_result(None)
