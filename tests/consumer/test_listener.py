"""What a listener's answer means (semantics §6.8, §6.9)."""

from __future__ import annotations

import pytest

from rmq_pipeline import limits
from rmq_pipeline.consumer.listener import ALL, Again, Result, again, done_of, suspension_ms


@pytest.mark.parametrize(
    ("result", "ack_index", "done"),
    [
        (Result.SUCCESS, ALL, 4),
        (Result.SUCCESS, 9, 4),
        (Result.SUCCESS, 3, 4),
        (Result.SUCCESS, 1, 2),
        (Result.SUCCESS, 0, 1),
        (Result.SUCCESS, -1, 0),
        (Result.SUCCESS, -5, 0),
        (Result.LATER, ALL, 0),
        (Result.LATER, 1, 0),
        (Result.SUSPEND, ALL, 0),
    ],
)
def test_messages_up_to_the_ack_index_are_done(result: Result, ack_index: int, done: int) -> None:
    assert done_of(result, ack_index=ack_index, count=4) == done


def test_a_delay_level_says_when_messages_come_again() -> None:
    assert again(0) == Again("retry")
    assert again(-1) == Again("dead_letter")
    assert again(1) == Again("retry", 1000)
    assert again(3) == Again("retry", 10_000)
    assert again(18) == again(99) == Again("retry", limits.DELAY_LEVELS_MS[-1])


@pytest.mark.parametrize(
    ("asked_ms", "suspended_ms"),
    [
        (None, 1000),
        (-1, 1000),
        (0, 10),
        (9, 10),
        (10, 10),
        (500, 500),
        (30_000, 30_000),
        (30_001, 30_000),
    ],
)
def test_a_suspension_is_ten_milliseconds_to_thirty_seconds(
    asked_ms: int | None, suspended_ms: int
) -> None:
    assert suspension_ms(asked_ms) == suspended_ms


def test_the_consumer_may_say_how_long_a_suspension_is() -> None:
    assert suspension_ms(None, usual_ms=50) == 50
    assert suspension_ms(-1, usual_ms=50) == 50
    assert suspension_ms(None, usual_ms=1) == 10
    assert suspension_ms(20, usual_ms=50) == 20
