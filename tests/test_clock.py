"""The wall clock, and the steady one, which goes on when somebody sets the other."""

import threading
import time

import pytest

from rmq_pipeline.clock import SteadyClock, SystemClock


@pytest.mark.parametrize("by_s", [-3600, 3600])
def test_a_steady_clock_does_not_follow_who_sets_the_clock(
    by_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steady, wall = SteadyClock(), SystemClock()
    real = time.time_ns
    assert abs(steady.now_ms() - wall.now_ms()) < 1_000

    monkeypatch.setattr(time, "time_ns", lambda: real() + by_s * 1_000_000_000)

    assert abs(wall.now_ms() - steady.now_ms()) > 3_000_000
    assert abs(steady.now_ms() - real() // 1_000_000) < 1_000


@pytest.mark.parametrize("make", [SystemClock, SteadyClock])
def test_no_wait_ends_before_the_moment(make: type[SystemClock]) -> None:
    clock, condition = make(), threading.Condition()

    for _ in range(20):
        at_ms = clock.now_ms() + 3
        with condition:
            clock.wait_until(condition, at_ms)
        assert clock.now_ms() >= at_ms
