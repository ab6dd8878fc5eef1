"""Waking those who wait for a topic: long polls, and the delivery of scheduled messages."""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeAlias

from rmq_pipeline.clock import Clock

#: By topic_id the consumer groups for which something may have become visible; None: for all.
Rung: TypeAlias = Mapping[int, Collection[int] | None]


class _Bell:
    __slots__ = ("condition", "version")

    def __init__(self) -> None:
        self.condition = threading.Condition(threading.Lock())
        self.version = 0


class Arrivals:
    """A bell for each topic_id, rung when something on it may have become visible."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._bells: dict[int, _Bell] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._listeners: tuple[Callable[[Rung], None], ...] = ()

    def _bell(self, topic_id: int) -> _Bell:
        found = self._bells.get(topic_id)
        if found is None:
            with self._lock:
                found = self._bells.setdefault(topic_id, _Bell())
        return found

    def version(self, topic_id: int) -> int:
        """To be read before looking; ``wait`` returns at once when the bell rang since."""
        return self._bell(topic_id).version

    def ring(self, topic_ids: Iterable[int]) -> None:
        """Wake whoever waits for one of these."""
        self.ring_for(dict.fromkeys(topic_ids))

    def ring_for(self, rung: Rung) -> None:
        """The same, where it is known for which consumer groups."""
        for topic_id in rung:
            bell = self._bell(topic_id)
            with bell.condition:
                bell.version += 1
                bell.condition.notify_all()
        if rung:
            for listener in self._listeners:
                listener(rung)

    def listen(self, listener: Callable[[Rung], None]) -> Callable[[], None]:
        """Have all bells of a frame told at once; the function that ends it.

        For those who wait without a thread. A listener is called from the writer's thread, after
        the versions have changed, and should note what it is told and return. At the end of the
        broker it is told of nothing.
        """

        def end() -> None:
            with self._lock:
                self._listeners = tuple(one for one in self._listeners if one is not listener)

        with self._lock:
            self._listeners = (*self._listeners, listener)
        return end

    def wait(self, topic_id: int, version: int, *, at_ms: int | None) -> None:
        """Wait until the bell has rung since ``version`` was read, or until ``at_ms``."""
        bell = self._bell(topic_id)
        with bell.condition:
            if bell.version == version and not self._closed:
                self._clock.wait_until(bell.condition, at_ms)

    @property
    def closed(self) -> bool:
        """Whether the broker is closing: nobody should wait any more."""
        return self._closed

    def close(self) -> None:
        """Wake everybody for good."""
        self._closed = True
        self.ring(list(self._bells))
        for listener in self._listeners:
            listener({})
