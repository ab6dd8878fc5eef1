"""A batch is settled as a whole, so it is no larger than what is worked on in good time."""

import pytest

from rmq_pipeline.handling.pace import BATCH_S, Pace

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
        pace.worked(pace.limit, took[-1])

    fits = MOST if not each_s else min(MOST, max(1, int(BATCH_S / each_s)))
    assert pace.limit == pytest.approx(fits, rel=0.01)
    # Nothing of what was learnt on the way took longer, but for the first and single messages.
    assert max(took[1:]) <= max(BATCH_S, each_s) * 1.01


def test_a_handler_that_becomes_slow_is_given_less_at_once() -> None:
    pace = Pace(MOST, first=MOST)

    pace.worked(MOST, 10 * BATCH_S)

    assert pace.limit == MOST // 10
