"""Messages of a queue one after another (semantics §6.9)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rmq_pipeline.clock import ManualClock
from rmq_pipeline.consumer.listener import Calling, Hooks, Result
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.orderly import CONTINUOUS_MS, UNLOCKED_MS, YIELD_MS, Orderly
from rmq_pipeline.consumer.statistics import Statistics
from rmq_pipeline.consumer.workers import Timetable, Workers
from tests.consumer.pieces import Gate, Settled, Work, held_queue, received, repeat
from tests.waiting import until


class Setup:
    """A listener that is called in order, and what became of its messages."""

    def __init__(self, listener: Work, *, batch: int = 1, max_reconsume_times: int = -1) -> None:
        self.clock = ManualClock()
        self.settled = Settled()
        self.calls: list[list[int]] = []
        self.locked = True
        self.workers = Workers(4, most=4, stuck_after_ms=10_000, name="test")
        self.timetable = Timetable(self.clock, name="test")
        self.statistics = Statistics(self.clock.now_ms)

        def noted(messages: Any, context: Any) -> Any:
            self.calls.append([message.queue_offset for message in messages])
            return listener(messages, context)

        calling = Calling(
            noted, group="g", hooks=Hooks(), failed=Result.SUSPEND, timeout_ms=900_000
        )
        self.service = Orderly(
            calling,
            settling=self.settled,
            workers=self.workers,
            statistics=self.statistics,
            timetable=self.timetable,
            clock=self.clock,
            holds=lambda _: self.locked,
            batch=batch,
            suspend_ms=1000,
            max_reconsume_times=max_reconsume_times,
        )
        self.queue = held_queue()

    def arrive(self, *offsets: int) -> None:
        self.service.arrived(self.queue, received(self.queue, offsets))

    def ended(self) -> None:
        until(lambda: self.queue.count == 0)

    def go_on(self) -> None:
        """Let time pass until all is done."""
        repeat(lambda: self.clock.advance(1000), lambda: self.queue.count == 0)

    def suspended_ms(self) -> int:
        """For how long the queue is, once it is."""
        until(lambda: self.timetable._due)
        return self.timetable._due[0][0] - self.clock.now_ms()


@pytest.fixture
def setups() -> Iterator[list[Setup]]:
    made: list[Setup] = []
    yield made
    for each in made:
        each.timetable.close()
        assert each.workers.close(30)


def failing(times: int, result: Any = None) -> Work:
    """A listener that fails so often, then succeeds."""
    left = [times]

    def listener(*_: Any) -> Any:
        left[0] -= 1
        return "success" if left[0] < 0 else result

    return listener


def test_messages_of_a_queue_are_given_in_order_one_call_at_a_time(
    setups: list[Setup],
) -> None:
    setup = Setup(lambda *_: "success", batch=2)
    setups.append(setup)

    setup.arrive(*range(100))
    setup.ended()

    assert setup.calls == [[i, i + 1] for i in range(0, 100, 2)]
    assert setup.settled.offsets("ack") == list(range(100))


def test_queues_do_not_wait_for_each_other(setups: list[Setup]) -> None:
    gate = Gate()

    def hang(messages: Any, _context: Any) -> str:
        if messages[0].queue_id == 0:
            gate.pass_through()
        return "success"

    setup = Setup(hang)
    setups.append(setup)
    other = held_queue(MessageQueue("flights", "rmq", 1))
    setup.arrive(1)
    assert gate.arrived.wait(30)

    setup.service.arrived(other, received(other, [1, 2]))
    until(lambda: other.count == 0)

    assert setup.queue.count == 1
    gate.open()


@pytest.mark.parametrize("result", [None, "suspend", "reconsume_later"])
def test_a_failure_suspends_the_queue_for_a_second_and_comes_again_first(
    result: str | None, setups: list[Setup]
) -> None:
    setup = Setup(failing(1, result))
    setups.append(setup)
    setup.arrive(1, 2)

    assert setup.suspended_ms() == 1000
    assert setup.calls == [[1]]
    setup.clock.advance(1000)
    setup.ended()

    assert setup.calls == [[1], [1], [2]]
    assert setup.settled.offsets("ack") == [1, 2]
    assert setup.statistics.totals("flights").failed == 1


def test_an_exception_suspends_and_counts_as_an_attempt(setups: list[Setup]) -> None:
    attempts: list[int] = []

    def fail(messages: Any, _context: Any) -> str:
        attempts.append(messages[0].delivery_attempt)
        if len(attempts) < 3:
            raise ValueError("again")
        return "success"

    setup = Setup(fail)
    setups.append(setup)
    setup.arrive(1)
    setup.go_on()

    assert attempts == [1, 2, 3]


@pytest.mark.parametrize(("asked_ms", "suspended_ms"), [(1, 10), (250, 250), (60_000, 30_000)])
def test_a_listener_may_say_how_long(asked_ms: int, suspended_ms: int, setups: list[Setup]) -> None:
    def suspend(_messages: Any, context: Any) -> str:
        context.suspend_ms = asked_ms
        return "suspend"

    setup = Setup(suspend)
    setups.append(setup)
    setup.arrive(1)

    assert setup.suspended_ms() == suspended_ms


@pytest.mark.parametrize("result", ["commit", "rollback"])
def test_with_auto_commit_commit_and_rollback_are_success_and_a_warning(
    result: str, setups: list[Setup], caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup(lambda *_: result)
    setups.append(setup)

    setup.arrive(1)
    setup.ended()

    assert setup.settled.offsets("ack") == [1]
    assert f"{result} for queue 0 of flights is for listeners without auto_commit" in caplog.text


class Neither:
    """Is not true, and not false."""

    def __bool__(self) -> bool:
        raise TypeError("neither")


def test_a_call_whose_end_is_not_understood_is_a_failure_and_the_queue_goes_on(
    setups: list[Setup], caplog: pytest.LogCaptureFixture
) -> None:
    undecided: list[Any] = [Neither()]

    def listener(_messages: Any, context: Any) -> str:
        context.auto_commit = undecided.pop() if undecided else True
        return "success"

    setup = Setup(listener)
    setups.append(setup)
    setup.arrive(1, 2)

    assert setup.suspended_ms() == 1000
    setup.clock.advance(1000)
    setup.ended()

    assert setup.calls == [[1], [1], [2]]
    assert setup.settled.offsets("ack") == [1, 2]
    assert "queue 0 of flights is suspended" in caplog.text


def by_hand(results: list[str]) -> Work:
    """A listener without auto_commit."""
    left = iter(results)

    def listener(_messages: Any, context: Any) -> str:
        context.auto_commit = False
        return next(left)

    return listener


def test_without_auto_commit_success_settles_nothing(setups: list[Setup]) -> None:
    setup = Setup(by_hand(["success", "success"]))
    setups.append(setup)
    setup.arrive(1, 2)

    until(lambda: setup.statistics.totals("flights").consumed == 2)

    assert setup.settled.parts == []
    assert setup.queue.count == 2


def test_without_auto_commit_commit_settles_all_since_the_last(setups: list[Setup]) -> None:
    setup = Setup(by_hand(["success", "commit", "success", "success"]))
    setups.append(setup)
    setup.arrive(1, 2, 3, 4)

    until(lambda: setup.statistics.totals("flights").consumed == 4)

    assert [[m.queue_offset for m in part.messages] for part in setup.settled.parts] == [[1, 2]]


def test_without_auto_commit_rollback_gives_all_again_after_a_while(
    setups: list[Setup],
) -> None:
    setup = Setup(by_hand(["success", "rollback", "success", "commit"]))
    setups.append(setup)
    setup.arrive(1, 2)

    assert setup.suspended_ms() == 1000
    assert setup.settled.parts == []
    setup.clock.advance(1000)
    setup.ended()

    assert setup.calls == [[1], [2], [1], [2]]
    assert setup.settled.offsets("ack") == [1, 2]


def test_without_auto_commit_suspend_gives_only_the_last_again(setups: list[Setup]) -> None:
    setup = Setup(by_hand(["success", "suspend", "commit"]))
    setups.append(setup)
    setup.arrive(1, 2)

    setup.clock.advance(setup.suspended_ms())
    setup.ended()

    assert setup.calls == [[1], [2], [2]]
    assert setup.settled.offsets("ack") == [1, 2]


def test_a_message_that_failed_too_often_is_retried_behind_others(setups: list[Setup]) -> None:
    def fail(messages: Any, _context: Any) -> str:
        if messages[0].queue_offset == 1:
            raise ValueError("never")
        return "success"

    setup = Setup(fail, max_reconsume_times=2)
    setups.append(setup)
    setup.arrive(1, 2)
    setup.go_on()

    assert setup.calls == [[1], [1], [1], [2]]
    assert setup.settled.offsets("ack") == [2]
    (retried,) = [part for part in setup.settled.parts if part.outcome == "retry"]
    assert (retried.reason, retried.retry_after_ms) == ("never", None)


def test_only_those_of_a_batch_go_that_failed_too_often(setups: list[Setup]) -> None:
    setup = Setup(failing(1), batch=2, max_reconsume_times=1)
    setups.append(setup)
    old, new = received(setup.queue, [1, 2], delivery_attempt=[2, 1])
    setup.service.arrived(setup.queue, [old, new])

    setup.clock.advance(setup.suspended_ms())
    setup.ended()

    assert setup.calls == [[1, 2], [2]]
    assert setup.settled.offsets("retry") == [1]


def test_a_queue_that_goes_on_for_a_minute_lets_others_go_first(setups: list[Setup]) -> None:
    def slow(*_: Any) -> str:
        setup.clock.advance(CONTINUOUS_MS // 2 + 1)
        return "success"

    setup = Setup(slow)
    setups.append(setup)
    setup.arrive(1, 2, 3)

    assert setup.suspended_ms() == YIELD_MS
    assert setup.calls == [[1], [2]]
    setup.clock.advance(YIELD_MS)
    setup.ended()


def test_nothing_is_given_while_the_queue_is_not_locked(setups: list[Setup]) -> None:
    setup = Setup(lambda *_: "success")
    setups.append(setup)
    setup.locked = False
    setup.arrive(1)

    assert setup.suspended_ms() == UNLOCKED_MS
    assert setup.calls == []
    setup.locked = True
    setup.clock.advance(UNLOCKED_MS)
    setup.ended()


def test_a_lock_that_is_lost_meanwhile_ends_it_after_the_call_under_way(
    setups: list[Setup],
) -> None:
    def lose(*_: Any) -> str:
        setup.locked = False
        return "success"

    setup = Setup(lose)
    setups.append(setup)
    setup.arrive(1, 2)

    assert setup.suspended_ms() == UNLOCKED_MS
    assert setup.calls == [[1]]


def test_a_dropped_queue_ends_after_the_call_under_way(setups: list[Setup]) -> None:
    def drop(*_: Any) -> str:
        setup.queue.drop()
        return "success"

    setup = Setup(drop)
    setups.append(setup)
    setup.arrive(1, 2)
    setup.ended()

    assert setup.workers.close(30)
    assert setup.calls == [[1]]


def test_calls_may_take_as_long_as_they_like(setups: list[Setup]) -> None:
    gate = Gate()

    setup = Setup(gate.hang)
    setups.append(setup)
    setup.arrive(1)
    assert gate.arrived.wait(30)

    setup.clock.advance(24 * 3600 * 1000)
    setup.service.expire()
    gate.open()
    setup.ended()

    assert setup.settled.offsets("ack") == [1]
    assert not setup.service.spans
