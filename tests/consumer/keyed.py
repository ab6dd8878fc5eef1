"""A listener that is called by key, and what became of its messages."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from rmq_pipeline.clock import ManualClock
from rmq_pipeline.consumer.by_key import ByKey, by_message_group
from rmq_pipeline.consumer.listener import Calling, Hooks, Result
from rmq_pipeline.consumer.received_message import ReceivedMessage
from rmq_pipeline.consumer.settler import Retries
from rmq_pipeline.consumer.statistics import Statistics
from rmq_pipeline.consumer.workers import Timetable, Workers
from tests.consumer.pieces import Settled, Work, held_queue, received, repeat
from tests.waiting import until


class Setup:
    """A listener that is called by key, and what became of its messages."""

    def __init__(
        self,
        listener: Work,
        *,
        batch: int = 1,
        threads: int = 4,
        max_attempts: int = 3,
        gives_back_behind: bool = False,
        key_of: Any = by_message_group,
        suspend_ms: int | None = 1000,
        backoff_ms: tuple[int, ...] = (1000,),
    ) -> None:
        self.clock = ManualClock()
        #: As the broker describes it.
        self.group: dict[str, Any] = {
            "max_attempts": max_attempts,
            "backoff": "customized",
            "backoff_ms": list(backoff_ms),
        }
        self.settled = Settled()
        self.calls: list[tuple[Hashable, list[int]]] = []
        self.locked = True
        self.workers = Workers(threads, most=threads, stuck_after_ms=10_000, name="test")
        self.timetable = Timetable(self.clock, name="test")
        self.statistics = Statistics(self.clock.now_ms)

        def noted(messages: Any, context: Any) -> Any:
            self.calls.append((context.key, [message.queue_offset for message in messages]))
            return listener(messages, context)

        self.service = ByKey(
            Calling(noted, group="g", hooks=Hooks(), failed=Result.LATER, timeout_ms=900_000),
            settling=self.settled,
            workers=self.workers,
            key_of=key_of,
            statistics=self.statistics,
            timetable=self.timetable,
            holds=lambda _: self.locked,
            batch=batch,
            suspend_ms=suspend_ms,
            retries=Retries(lambda: self.group, known=self.group, clock=self.clock),
            gives_back_behind=gives_back_behind,
        )
        self.queue = held_queue()

    def arrive(self, keys: str | list[str | None], start: int = 0) -> list[ReceivedMessage]:
        """One message a key, as letters."""
        offsets = range(start, start + len(keys))
        messages = received(self.queue, offsets, message_group=list(keys))
        self.service.arrived(self.queue, messages)
        return messages

    def ended(self) -> None:
        until(lambda: self.queue.count == 0 and not self.service._lines)

    def go_on(self) -> None:
        """Let time pass until all is done."""
        repeat(lambda: self.clock.advance(1000), lambda: self.queue.count == 0)

    def suspended_ms(self) -> int:
        """For how long the first key is, once it is."""
        until(lambda: self.timetable._due)
        return self.timetable._due[0][0] - self.clock.now_ms()

    def of(self, key: Hashable) -> list[list[int]]:
        """The calls of a key."""
        return [offsets for of, offsets in self.calls if of == key]
