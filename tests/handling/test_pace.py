"""A batch is settled as a whole, so it is no larger than what is worked on in good time."""

import pytest

from rmq_pipeline.handling.pace import BATCH_S, LONGEST_S, Pace

MOST = 20_000


def test_it_begins_with_few_or_all() -> None:
    assert Pace(MOST, first=256).limit == 256
    assert Pace(100, first=256).limit == 100


@pytest.mark.parametrize("first", [1, 256])
@pytest.mark.parametrize("each_s", [0.0, 1e-6, 0.001, 0.5, 10.0, 3_600.0])
def test_it_comes_to_what_fits(first: int, each_s: float) -> None:
    pace = Pace(MOST, first=first)
    took = []

    for _ in range(20):
        took.append(pace.limit * each_s)
        pace.handled(pace.limit, took[-1])

    fits = MOST if not each_s else min(MOST, max(1, int(BATCH_S / each_s)))
    assert pace.limit == pytest.approx(fits, rel=0.01)
    # Nothing of what was learnt on the way took longer, but for the first and single messages.
    assert max(took[1:]) <= max(BATCH_S, each_s) * 1.01


def test_a_handler_that_becomes_slow_is_given_less_at_once() -> None:
    pace = Pace(MOST, first=MOST)

    pace.handled(MOST, 10 * BATCH_S)

    assert pace.limit == MOST // 10


def test_a_few_messages_at_a_time_neither_raise_the_limit_nor_lower_it() -> None:
    few, many = Pace(MOST, first=16), Pace(MOST, first=MOST)

    for _ in range(10):
        few.handled(1, 0.001)
        many.handled(1, 0.001)

    assert (few.limit, many.limit) == (16, MOST)
    few.handled(3, 0.003)
    assert few.limit == 24


def test_a_refusal_for_size_halves_the_limit_and_it_grows_with_care() -> None:
    pace = Pace(MOST, first=MOST)

    pace.refused(4_000)
    pace.handled(4_000, 0.1)
    assert pace.limit == 2_000
    pace.refused(2_000)
    assert pace.limit == 1_000

    pace.settled(999)
    pace.handled(999, 0.1)
    assert pace.limit == 1_000
    pace.settled(1_000)
    pace.handled(1_000, 0.1)
    assert pace.limit == 1_125
    pace.refused(1)
    assert pace.limit == 1


def test_failures_do_not_raise_the_limit() -> None:
    pace = Pace(MOST, first=256)

    pace.handled(256, 0.01, failed=256)
    assert pace.limit == 256
    pace.handled(256, 0.01, failed=216)
    assert pace.limit == 8 * 40


@pytest.mark.parametrize("failed", [90, 100])
def test_failures_that_take_long_lower_it(failed: int) -> None:
    pace = Pace(MOST, first=256)

    pace.handled(100, 10 * BATCH_S, failed=failed)

    assert pace.limit == (1 if failed == 90 else 10)


def test_the_price_of_a_batch_is_not_that_of_its_messages() -> None:
    pace = Pace(100_000, first=100_000, least=500)

    pace.handled(1, 3.0)
    assert pace.limit == 500
    pace.handled(500, 0.4)
    assert pace.limit == 4_000
    for _ in range(10):
        pace.handled(pace.limit, 70 + pace.limit * 0.001)
    assert pace.limit >= 500
    assert Pace(100, first=1, least=500).limit == 100


@pytest.mark.parametrize("each_s", [20.0, 61.0, 72.0, 90.0, 300.0])
@pytest.mark.parametrize("threads", [1, 8, 32])
@pytest.mark.parametrize("groups", [1, 10_000])
def test_slow_messages_keep_the_threads_busy_and_are_settled_in_time(
    each_s: float, threads: int, groups: int
) -> None:
    pace = Pace(MOST, first=16, at_once=threads)

    for _ in range(20):
        n = pace.limit
        side_by_side = min(threads, groups, n)
        pace.handled(n, -(-n // side_by_side) * each_s, parts=min(8 * threads, groups, n))

    assert pace.limit >= min(threads, LONGEST_S // each_s)
    # One after the other, as in one message group, or side by side for a minute.
    assert pace.limit * each_s <= max(LONGEST_S, threads * BATCH_S, each_s)
