"""Wakeups of calls that wait for a topic: long polls, and the delivery of scheduled messages."""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeAlias

from rmq_pipeline.clock import Clock

#: By topic_id, the consumer groups for which messages may have become visible; None: all groups.
Rung: TypeAlias = Mapping[int, Collection[int] | None]


class _Bell:
    __slots__ = ("condition", "version")

    def __init__(self) -> None:
        self.condition = threading.Condition(threading.Lock())
        self.version = 0


class Arrivals:
    """Wakeups by topic_id, sent when something in the topic may have become visible."""

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
        """Return the topic's version.

        Read it before looking: ``wait`` returns at once if the version has changed since.
        """
        return self._bell(topic_id).version

    def ring(self, topic_ids: Iterable[int]) -> None:
        """Wake all calls that wait for one of these topics."""
        self.ring_for(dict.fromkeys(topic_ids))

    def ring_for(self, rung: Rung) -> None:
        """Wake the calls that wait for these topics and groups."""
        for topic_id in rung:
            bell = self._bell(topic_id)
            with bell.condition:
                bell.version += 1
                bell.condition.notify_all()
        if rung:
            for listener in self._listeners:
                listener(rung)

    def listen(self, listener: Callable[[Rung], None]) -> Callable[[], None]:
        """Call a listener with all wakeups of a frame; return a function that removes it.

        For calls that wait without a thread. The writer's thread calls the listener, after the
        versions have changed. The listener must only record the wakeups and return. When the broker
        closes, it gets an empty mapping.
        """

        def end() -> None:
            with self._lock:
                self._listeners = tuple(one for one in self._listeners if one is not listener)

        with self._lock:
            self._listeners = (*self._listeners, listener)
        return end

    def wait(self, topic_id: int, version: int, *, at_ms: int | None) -> None:
        """Wait until the topic's version differs from ``version``, or until ``at_ms``."""
        bell = self._bell(topic_id)
        with bell.condition:
            if bell.version == version and not self._closed:
                self._clock.wait_until(bell.condition, at_ms)

    @property
    def closed(self) -> bool:
        """True while the broker closes: calls must stop waiting."""
        return self._closed

    def close(self) -> None:
        """Wake all waiting calls, and let no later call wait."""
        self._closed = True
        self.ring(list(self._bells))
        for listener in self._listeners:
            listener({})
