"""Calls at their time, by the broker's clock."""

from collections.abc import Iterator

import pytest

from rmq_pipeline.clock import ManualClock
from rmq_pipeline.rocketmq.alarm import Alarm
from tests.waiting import until


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(0)


@pytest.fixture
def alarm(clock: ManualClock) -> Iterator[Alarm]:
    alarm = Alarm(clock)
    alarm.start()
    yield alarm
    alarm.close()


def test_calls_come_at_their_time_and_in_its_order(alarm: Alarm, clock: ManualClock) -> None:
    made: list[int] = []
    for at_ms in (30, 10, 20):
        alarm.at(at_ms, lambda at_ms=at_ms: made.append(at_ms))  # type: ignore[misc]

    clock.advance(20)
    until(lambda: len(made) == 2)
    assert made == [10, 20]

    clock.advance(9)
    alarm.at(29, lambda: made.append(29))
    until(lambda: len(made) == 3)
    clock.advance(1)
    until(lambda: len(made) == 4)
    assert made == [10, 20, 29, 30]


def test_a_call_that_was_cancelled_is_not_made(alarm: Alarm, clock: ManualClock) -> None:
    made: list[str] = []
    alarm.at(10, lambda: made.append("cancelled")).cancel()
    alarm.at(10, lambda: made.append("made"))

    clock.advance(10)

    until(lambda: made)
    assert made == ["made"]


def test_a_call_that_fails_is_nobody_elses(
    alarm: Alarm, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[str] = []
    alarm.at(10, lambda: made.remove("nothing"))
    alarm.at(10, lambda: made.append("made"))

    clock.advance(10)

    until(lambda: made)
    assert "A call at its time has failed." in caplog.text
