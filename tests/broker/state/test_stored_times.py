"""Storage times of a queue are known to a second, or to a quarter of the age that they tell."""

import random

from rmq_pipeline.broker.state.stored_times import MOST, SPACING_MS, StoredTimes

DAY_MS = 86_400_000


def noted(times: StoredTimes, offset: int, at_ms: int) -> None:
    """As the state does it."""
    if at_ms >= times.next_ms:
        times.note(offset, at_ms)


def test_a_message_before_the_first_mark_has_no_time() -> None:
    times = StoredTimes()
    assert times.at(0) is None

    noted(times, 5, 1_000)

    assert times.at(4) is None
    assert times.at(5) == times.at(500) == 1_000


def test_marks_are_a_second_apart() -> None:
    times = StoredTimes()
    for offset in range(100):
        noted(times, offset, 10_000 + offset * 100)

    errors = [10_000 + offset * 100 - (times.at(offset) or 0) for offset in range(100)]

    assert min(errors) >= 0
    assert max(errors) < SPACING_MS


def test_old_marks_are_thinned_out_and_stay_true() -> None:
    dice, times = random.Random(7), StoredTimes()
    stored: list[int] = []
    now_ms = 0
    for offset in range(50_000):
        now_ms += dice.randrange(20_000)
        stored.append(now_ms)
        noted(times, offset, now_ms)

    assert len(times._offsets) < MOST
    known = [offset for offset in range(50_000) if times.at(offset) is not None]
    assert now_ms - stored[known[0]] > DAY_MS, "more than a day is known"
    for offset in known[::17]:
        late = stored[offset] - (times.at(offset) or 0)
        age = now_ms - stored[offset]
        assert 0 <= late <= max(SPACING_MS, 20_000, (age + late) // 4), (offset, late, age)
