"""How fast a consumer is, by topic (semantics §6.11)."""

from __future__ import annotations

from rmq_pipeline.clock import ManualClock
from rmq_pipeline.consumer.statistics import Statistics


def test_rates_and_mean_times_are_those_since_the_beginning_at_first() -> None:
    clock = ManualClock()
    statistics = Statistics(clock.now_ms)
    statistics.consumed("t", done=0, failed=0, took_ms=0.0)
    statistics.consumed("t", done=30, failed=10, took_ms=6.0)
    statistics.pulled("t", messages=50, took_ms=5.0)
    clock.advance(10_000)

    assert statistics.report("t") == {
        "consume_rt_ms": 3.0,
        "consume_ok_per_s": 3.0,
        "consume_failed_per_s": 1.0,
        "pull_rt_ms": 5.0,
        "pulled_per_s": 5.0,
    }


def test_what_is_older_than_a_minute_does_not_count() -> None:
    clock = ManualClock()
    statistics = Statistics(clock.now_ms)
    statistics.consumed("t", done=600, failed=0, took_ms=100.0)
    for _ in range(13):
        clock.advance(5_000)
        statistics.report("t")

    statistics.consumed("t", done=60, failed=0, took_ms=1.0)

    report = statistics.report("t")
    assert report["consume_ok_per_s"] == 1.0
    assert report["consume_rt_ms"] == 1.0


def test_topics_are_counted_apart_and_nothing_is_nothing() -> None:
    clock = ManualClock()
    statistics = Statistics(clock.now_ms)
    statistics.consumed("t", done=1, failed=2, took_ms=1.0)

    assert set(statistics.report("u").values()) == {0.0}
    totals = statistics.totals("t")
    assert (totals.consumed, totals.failed, totals.calls) == (1, 2, 1)


def test_rates_begin_again_when_the_clock_is_set_back() -> None:
    now_ms = 1_000_000
    statistics = Statistics(lambda: now_ms)
    statistics.consumed("t", done=5_000, failed=0, took_ms=100.0)
    now_ms += 10_000
    assert statistics.report("t")["consume_ok_per_s"] == 500.0

    now_ms -= 600_000
    statistics.consumed("t", done=60, failed=0, took_ms=1.0)
    assert statistics.report("t")["consume_ok_per_s"] == 0.0
    for _ in range(4):
        now_ms += 5_000
        statistics.consumed("t", done=50, failed=0, took_ms=1.0)
        assert statistics.report("t")["consume_ok_per_s"] == 10.0

    assert statistics.totals("t").consumed == 5_260
