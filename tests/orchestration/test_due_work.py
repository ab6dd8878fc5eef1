"""What the sensors decide, from facts and memory alone."""

from typing import Any

import pytest

from rmq_pipeline.orchestration.due_work import (
    ASK_AGAIN_MS,
    BUSY_FOR_MS,
    HAND_OVER_AFTER_MS,
    Memory,
    wanted_consumer,
    wanted_upkeep,
)
from rmq_pipeline.orchestration.windows import AHEAD_MS, IN_A_CALL_AFTER_MS, JOBS

NOW_MS = 1_700_000_000_000
JOB = "deliver_scheduled"


def due(now_ms: int = NOW_MS, **facts: Any) -> dict[str, Any]:
    quiet: dict[str, Any] = {"due": 0, "next_due_ms": None, "window": None}
    return {"now_ms": now_ms, "jobs": {JOB: {**quiet, **facts}}}


def wanted(memory: Memory, **facts: Any) -> list[tuple[str, int]]:
    jobs = {JOB: JOBS[JOB]}
    found = wanted_upkeep(due(**facts), jobs, memory=memory)
    return [(each.run_key, each.hand_over_from) for each in found]


def window(epoch: int, *, renewed_at_ms: int = NOW_MS) -> dict[str, int]:
    return {"epoch": epoch, "expires_at_ms": renewed_at_ms + JOBS[JOB].lease_ms}


def test_nothing_due_wants_nothing() -> None:
    assert wanted(Memory()) == []


def test_work_far_ahead_wants_nothing() -> None:
    assert wanted(Memory(), next_due_ms=NOW_MS + AHEAD_MS + 1) == []


def test_due_work_wants_one_window() -> None:
    assert len(wanted(Memory(), due=3)) == 1


def test_work_due_before_a_run_is_up_wants_a_window() -> None:
    assert len(wanted(Memory(), next_due_ms=NOW_MS + AHEAD_MS)) == 1


@pytest.mark.parametrize("serial", [0, NOW_MS + 1])
def test_same_tick_twice_makes_a_key_each(serial: int) -> None:
    cursor = Memory(serial=serial).dump()

    first, again = (
        wanted(Memory.load(cursor), now_ms=now_ms, due=1) for now_ms in (NOW_MS, NOW_MS + 5_000)
    )

    # No key tells that it is the same work: a run that is to come does, and the window.
    assert len(first) == len(again) == 1
    assert first != again


def test_next_tick_waits_for_the_run_it_requested() -> None:
    memory = Memory()
    wanted(memory, due=1)

    assert wanted(memory, now_ms=NOW_MS + 5_000, due=1) == []


def test_a_run_that_never_opened_its_window_is_requested_again() -> None:
    memory = Memory()
    first = wanted(memory, due=1)

    again = wanted(memory, now_ms=NOW_MS + ASK_AGAIN_MS, due=1)

    assert len(again) == 1
    assert again != first


def test_a_window_that_came_and_went_is_followed_at_once() -> None:
    memory = Memory()
    wanted(memory, due=1)
    wanted(memory, now_ms=NOW_MS + 2_000, window=window(1))

    assert len(wanted(memory, now_ms=NOW_MS + 4_000, due=1)) == 1


def test_young_window_is_left_alone() -> None:
    memory = Memory()
    wanted(memory, due=1, window=window(7))

    now_ms = NOW_MS + HAND_OVER_AFTER_MS - 1
    assert wanted(memory, now_ms=now_ms, window=window(7, renewed_at_ms=now_ms)) == []


def test_busy_window_is_handed_over_once() -> None:
    memory = Memory()
    wanted(memory, due=1, window=window(7))

    later = NOW_MS + HAND_OVER_AFTER_MS
    first = wanted(memory, now_ms=later, window=window(7, renewed_at_ms=later))
    again = wanted(memory, now_ms=later + 5_000, window=window(7, renewed_at_ms=later + 5_000))

    assert [epoch for _, epoch in first] == [7]
    assert again == []


def test_window_in_a_long_call_is_not_handed_over_until_the_call_has_ended() -> None:
    memory = Memory()
    wanted(memory, due=1, window=window(7))

    later = NOW_MS + HAND_OVER_AFTER_MS
    in_a_call = window(7, renewed_at_ms=later - IN_A_CALL_AFTER_MS - 1)
    during = wanted(memory, now_ms=later, window=in_a_call)
    after = wanted(memory, now_ms=later + 1_000, window=window(7, renewed_at_ms=later + 1_000))

    assert during == []
    assert [epoch for _, epoch in after] == [7]


def test_windows_stop_ten_minutes_after_the_last_work() -> None:
    memory = Memory()
    wanted(memory, due=1)
    wanted(memory, now_ms=NOW_MS + 2_000, window=window(1))

    assert wanted(memory, now_ms=NOW_MS + BUSY_FOR_MS - 1)
    assert wanted(memory, now_ms=NOW_MS + 2 * BUSY_FOR_MS) == []


def test_windows_stop_sooner_where_that_is_wanted() -> None:
    memory, jobs = Memory(), {JOB: JOBS[JOB]}
    wanted_upkeep(due(due=1), jobs, memory=memory, busy_for_ms=0)
    wanted_upkeep(due(NOW_MS + 2_000, window=window(1)), jobs, memory=memory, busy_for_ms=0)

    now_ms = NOW_MS + HAND_OVER_AFTER_MS + 2_000
    later = due(now_ms, window=window(1, renewed_at_ms=now_ms))

    assert not wanted_upkeep(later, jobs, memory=memory, busy_for_ms=0)


def test_memory_survives_as_a_cursor() -> None:
    memory = Memory()
    wanted(memory, due=1, window=window(7))

    assert Memory.load(memory.dump()) == memory


def key_of(cursor: str | None, now_ms: int) -> tuple[str, str]:
    """A tick that requests a window: its run key, and the cursor that it leaves."""
    memory = Memory.load(cursor)
    return memory.next_key(JOB, now_ms), memory.dump()


@pytest.mark.parametrize("serial", [0, NOW_MS // 60_000 + 1_440])
def test_sensor_that_was_reset_makes_a_key_never_used_before(serial: int) -> None:
    cursor: str | None = Memory(serial=serial).dump() if serial else None
    now_ms, used, every_ms = NOW_MS, set(), 30_000
    for now_ms in range(NOW_MS, NOW_MS + 86_400_000, every_ms):
        key, cursor = key_of(cursor, now_ms)
        assert key not in used
        used.add(key)

    first, cursor = key_of(None, now_ms + every_ms)
    second, _ = key_of(cursor, now_ms + 2 * every_ms)

    assert not used & {first, second}


def test_windows_of_one_tick_have_keys_of_their_own() -> None:
    memory = Memory()

    assert len({memory.next_key("x", NOW_MS) for _ in JOBS}) == len(JOBS)


def consumer(memory: Memory, *, now_ms: int = NOW_MS, held: int = 0, **facts: Any) -> str | None:
    window = facts.pop("window", None)
    groups = {"g": {"topics": {"t": facts}, "window": window}}
    found = wanted_consumer(
        {"now_ms": now_ms, "groups": groups},
        group="g",
        topic="t",
        memory=memory,
        orphans=lambda: held,
    )
    return found.reason if found else None


def test_idle_consumer_wants_nothing() -> None:
    assert consumer(Memory(), ready=0, unsettled=0, next_visible_ms=None) is None


def test_ready_messages_want_a_window() -> None:
    assert consumer(Memory(), ready=1) == "1 messages ready"


def test_a_live_window_takes_its_messages_itself() -> None:
    assert consumer(Memory(), ready=1, window={"epoch": 1}) is None


def test_a_retry_far_ahead_wants_nothing() -> None:
    later = NOW_MS + 60_000
    assert consumer(Memory(), ready=0, unsettled=1, next_visible_ms=later) is None


def test_a_retry_due_before_a_run_is_up_wants_a_window() -> None:
    soon = NOW_MS + 1_000
    assert consumer(Memory(), ready=0, unsettled=1, next_visible_ms=soon) is not None


def test_messages_of_a_dead_window_want_a_window() -> None:
    later = NOW_MS + 1_800_000
    assert consumer(Memory(), ready=0, unsettled=5, next_visible_ms=later, held=5) is not None
