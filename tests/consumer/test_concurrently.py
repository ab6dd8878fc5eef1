"""Messages in no order (semantics §6.8)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rmq_pipeline.clock import ManualClock
from rmq_pipeline.consumer.concurrently import Concurrently
from rmq_pipeline.consumer.listener import Call, Calling, Hook, Hooks, Result, Status
from rmq_pipeline.consumer.statistics import Statistics
from rmq_pipeline.consumer.workers import Workers
from tests.consumer.pieces import Gate, Settled, Work, held_queue, received
from tests.waiting import until

TIMEOUT_MS = 15 * 60 * 1000


class Setup:
    """A listener that is called concurrently, and what became of its messages."""

    def __init__(
        self,
        listener: Work,
        *hooks: Hook,
        batch: int = 1,
        threads: int = 2,
        late_after_ms: int = TIMEOUT_MS,
    ) -> None:
        self.clock = ManualClock()
        self.settled = Settled()
        self.statistics = Statistics(self.clock.now_ms)
        self.workers = Workers(threads, most=threads, stuck_after_ms=10_000, name="test")
        calling = Calling(
            listener,
            group="g",
            hooks=Hooks(hooks),
            failed=Result.LATER,
            timeout_ms=late_after_ms,
        )
        self.service = Concurrently(
            calling,
            settling=self.settled,
            workers=self.workers,
            statistics=self.statistics,
            clock=self.clock,
            batch=batch,
            timeout_ms=TIMEOUT_MS,
        )
        self.queue = held_queue()

    def arrive(self, *offsets: int) -> None:
        self.service.arrived(self.queue, received(self.queue, offsets))

    def ended(self) -> None:
        until(lambda: self.queue.count == 0)


@pytest.fixture
def setups() -> Iterator[list[Setup]]:
    made: list[Setup] = []
    yield made
    for each in made:
        assert each.workers.close(30)


def test_messages_that_succeed_are_acknowledged(setups: list[Setup]) -> None:
    setup = Setup(lambda *_: Result.SUCCESS)
    setups.append(setup)

    setup.arrive(1, 2, 3)
    setup.ended()

    assert sorted(setup.settled.offsets("ack")) == [1, 2, 3]
    assert setup.statistics.totals("flights").consumed == 3


def test_a_call_has_a_batch_and_one_message_by_default(setups: list[Setup]) -> None:
    sizes: list[int] = []

    def count(messages: Any, _context: Any) -> str:
        sizes.append(len(messages))
        return "success"

    one, three = Setup(count, threads=1), Setup(count, batch=3, threads=1)
    setups += [one, three]

    one.arrive(1, 2)
    one.ended()
    three.arrive(1, 2, 3, 4)
    three.ended()

    assert sizes == [1, 1, 3, 1]


def test_a_failure_comes_again_when_the_group_says(setups: list[Setup]) -> None:
    def fail(_messages: Any, _context: Any) -> str:
        raise ValueError("no gate")

    setup = Setup(fail)
    setups.append(setup)

    setup.arrive(1)
    setup.ended()

    (part,) = setup.settled.parts
    assert (part.outcome, part.retry_after_ms) == ("retry", None)
    assert (part.reason, part.error_type) == ("no gate", "ValueError")
    assert setup.statistics.totals("flights").failed == 1


@pytest.mark.parametrize(
    ("level", "outcome", "after_ms"), [(-1, "dead_letter", None), (4, "retry", 30_000)]
)
def test_a_listener_may_say_what_becomes_of_failures(
    level: int, outcome: str, after_ms: int | None, setups: list[Setup]
) -> None:
    def later(_messages: Any, context: Any) -> str:
        context.delay_level_when_next_consume = level
        return "reconsume_later"

    setup = Setup(later)
    setups.append(setup)

    setup.arrive(1)
    setup.ended()

    (part,) = setup.settled.parts
    assert (part.outcome, part.retry_after_ms) == (outcome, after_ms)


def test_the_ack_index_divides_a_batch(setups: list[Setup]) -> None:
    def some(_messages: Any, context: Any) -> str:
        context.ack_index = 1
        return "success"

    setup = Setup(some, batch=4)
    setups.append(setup)

    setup.arrive(1, 2, 3, 4)
    setup.ended()

    assert setup.settled.offsets("ack") == [1, 2]
    assert setup.settled.offsets("retry") == [3, 4]
    assert setup.settled.parts[1].reason == "the listener finished 2 of 4 messages"


def test_a_call_that_takes_too_long_is_sent_back_and_its_answer_ignored(
    setups: list[Setup],
) -> None:
    gate = Gate()

    setup = Setup(gate.hang)
    setups.append(setup)
    setup.arrive(1)
    assert gate.arrived.wait(30)

    setup.clock.advance(TIMEOUT_MS - 1)
    setup.service.expire()
    assert setup.settled.parts == []
    setup.clock.advance(1)
    setup.service.expire()
    gate.open()
    until(lambda: setup.statistics.totals("flights").calls == 1)

    assert setup.workers.close(30)
    (part,) = setup.settled.parts
    assert (part.outcome, part.retry_after_ms, part.error_type) == ("retry", 10_000, "time_out")
    assert part.reason == "the listener took longer than 900000 ms"


def test_nothing_of_a_dropped_queue_is_begun(setups: list[Setup]) -> None:
    gate, called = Gate(), []

    def hang(messages: Any, _context: Any) -> str:
        called.append(messages[0].queue_offset)
        gate.pass_through()
        return "success"

    setup = Setup(hang, threads=1)
    setups.append(setup)
    setup.arrive(1, 2, 3)
    assert gate.arrived.wait(30)

    left = setup.queue.drop()
    gate.open()
    until(lambda: setup.workers.idle and setup.queue.is_quiet)

    assert [m.queue_offset for m in left] == [2, 3]
    assert called == [1]
    assert setup.settled.offsets("ack") == [1]


def test_the_span_of_offsets_counts() -> None:
    assert Concurrently.spans


class Told:
    """A hook that remembers how calls have ended."""

    def __init__(self) -> None:
        self.statuses: list[Status | None] = []

    def before(self, call: Call) -> None:
        """Nothing is known yet."""

    def after(self, call: Call) -> None:
        self.statuses.append(call.status)


@pytest.mark.parametrize(("said", "outcome"), [("success", "ack"), ("reconsume_later", "retry")])
def test_a_late_answer_counts_if_it_is_the_first_and_is_reported_as_timed_out(
    said: str, outcome: str, setups: list[Setup]
) -> None:
    told = Told()
    setup = Setup(lambda *_: said, told, late_after_ms=0)
    setups.append(setup)

    setup.service.expire()
    setup.arrive(1)
    setup.ended()
    until(lambda: told.statuses)

    assert told.statuses == [Status.TIME_OUT]
    assert setup.settled.offsets(outcome) == [1]
    totals = setup.statistics.totals("flights")
    assert (totals.consumed, totals.failed) == ((1, 0) if outcome == "ack" else (0, 1))
