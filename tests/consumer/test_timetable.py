"""Things to do later."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rmq_pipeline.clock import ManualClock
from rmq_pipeline.consumer.workers import Timetable
from tests.waiting import until


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def timetable(clock: ManualClock) -> Iterator[Timetable]:
    timetable = Timetable(clock, name="test")
    yield timetable
    timetable.close()


def test_what_is_due_is_done_in_the_order_of_its_time(
    clock: ManualClock, timetable: Timetable
) -> None:
    done: list[str] = []
    timetable.after(30, lambda: done.append("last"))
    timetable.after(10, lambda: done.append("first"))
    timetable.after(20, lambda: done.append("second"))

    clock.advance(9)
    assert done == []
    clock.advance(11)
    until(lambda: done == ["first", "second"])
    clock.advance(10)
    until(lambda: done == ["first", "second", "last"])


def test_an_earlier_one_does_not_wait_for_a_later_one(
    clock: ManualClock, timetable: Timetable
) -> None:
    done: list[str] = []
    timetable.after(10_000, lambda: done.append("late"))
    until(lambda: clock._waiting)
    timetable.after(0, lambda: done.append("now"))

    until(lambda: done == ["now"])


def test_something_is_done_again_and_again_even_when_it_fails(
    clock: ManualClock, timetable: Timetable, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[int] = []

    def fail() -> None:
        done.append(clock.now_ms())
        raise RuntimeError("again")

    timetable.every(10, fail)
    for times in (1, 2, 3):
        clock.advance(10)
        until(lambda times=times: len(done) == times and timetable._due)  # type: ignore[misc]

    assert "failed" in caplog.text


def test_nothing_is_done_once_it_is_closed(clock: ManualClock) -> None:
    done: list[str] = []
    timetable = Timetable(clock, name="test")
    timetable.after(10, lambda: done.append("late"))

    timetable.close()
    clock.advance(20)

    assert done == []
