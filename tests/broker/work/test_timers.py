"""Calls at their time, by the broker's clock."""

import threading
from collections.abc import Iterator

import pytest
from typing_extensions import override

from rmq_pipeline.broker.work.timekeeping import Timers
from rmq_pipeline.clock import ManualClock
from tests.waiting import until


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(0)


@pytest.fixture
def timers(clock: ManualClock) -> Iterator[Timers]:
    timers = Timers(clock)
    timers.start()
    yield timers
    timers.close()


def test_calls_come_at_their_time_and_in_its_order(timers: Timers, clock: ManualClock) -> None:
    made: list[int] = []
    for at_ms in (30, 10, 20):
        timers.at(at_ms, lambda at_ms=at_ms: made.append(at_ms))  # type: ignore[misc]

    clock.advance(20)
    until(lambda: len(made) == 2)
    assert made == [10, 20]

    clock.advance(9)
    timers.at(29, lambda: made.append(29))
    until(lambda: len(made) == 3)
    clock.advance(1)
    until(lambda: len(made) == 4)
    assert made == [10, 20, 29, 30]


def test_a_call_that_was_cancelled_is_not_made(timers: Timers, clock: ManualClock) -> None:
    made: list[str] = []
    timers.at(10, lambda: made.append("cancelled")).cancel()
    timers.at(10, lambda: made.append("made"))

    clock.advance(10)

    until(lambda: made)
    assert made == ["made"]


def test_a_call_that_fails_is_nobody_elses(
    timers: Timers, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[str] = []
    timers.at(10, lambda: made.remove("nothing"))
    timers.at(10, lambda: made.append("made"))

    clock.advance(10)

    until(lambda: made)
    assert "A timer's call failed." in caplog.text


class Failing(ManualClock):
    """A clock that fails some times."""

    left = 2

    @override
    def wait_until(self, condition: threading.Condition, at_ms: int | None) -> None:
        if self.left and at_ms is not None:
            self.left -= 1
            raise OverflowError("timestamp too large")
        super().wait_until(condition, at_ms)


def test_calls_come_after_the_clock_has_failed() -> None:
    clock = Failing(0)
    timers = Timers(clock)
    timers.start()
    made: list[int] = []
    timers.at(10, lambda: made.append(10))
    until(lambda: not clock.left)

    clock.advance(10)

    until(lambda: made == [10])
    timers.close()
