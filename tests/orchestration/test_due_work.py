"""What the sensors decide, from facts and memory alone."""

from typing import Any

from rmq_pipeline.orchestration.due_work import (
    ASK_AGAIN_MS,
    BUSY_FOR_MS,
    HAND_OVER_AFTER_MS,
    Memory,
    wanted_consumer,
    wanted_upkeep,
)
from rmq_pipeline.orchestration.windows import AHEAD_MS, JOBS

NOW_MS = 1_700_000_000_000
JOB = "deliver_scheduled"


def due(now_ms: int = NOW_MS, **facts: Any) -> dict[str, Any]:
    quiet: dict[str, Any] = {"due": 0, "next_due_ms": None, "window": None}
    return {"now_ms": now_ms, "jobs": {JOB: {**quiet, **facts}}}


def wanted(memory: Memory, **facts: Any) -> list[tuple[str, int]]:
    jobs = {JOB: JOBS[JOB]}
    found = wanted_upkeep(due(**facts), jobs, memory=memory)
    return [(each.run_key, each.hand_over_from) for each in found]


def test_nothing_due_wants_nothing() -> None:
    assert wanted(Memory()) == []


def test_work_far_ahead_wants_nothing() -> None:
    assert wanted(Memory(), next_due_ms=NOW_MS + AHEAD_MS + 1) == []


def test_due_work_wants_one_window() -> None:
    assert len(wanted(Memory(), due=3)) == 1


def test_work_due_before_a_run_is_up_wants_a_window() -> None:
    assert len(wanted(Memory(), next_due_ms=NOW_MS + AHEAD_MS)) == 1


def test_same_tick_twice_makes_the_same_key() -> None:
    cursor = Memory(serial=40_000_000).dump()

    first, again = (wanted(Memory.load(cursor), due=1) for _ in range(2))

    assert first == again


def test_first_tick_twice_makes_the_same_key() -> None:
    assert wanted(Memory(), due=1) == wanted(Memory(), due=1)


def test_next_tick_waits_for_the_run_it_requested() -> None:
    memory = Memory()
    wanted(memory, due=1)

    assert wanted(memory, now_ms=NOW_MS + 5_000, due=1) == []


def test_a_run_that_never_opened_its_window_is_requested_anew() -> None:
    memory = Memory()
    first = wanted(memory, due=1)

    again = wanted(memory, now_ms=NOW_MS + ASK_AGAIN_MS, due=1)

    assert len(again) == 1
    assert again != first


def test_a_window_that_came_and_went_is_followed_at_once() -> None:
    memory = Memory()
    wanted(memory, due=1)
    wanted(memory, now_ms=NOW_MS + 2_000, window={"epoch": 1})

    assert len(wanted(memory, now_ms=NOW_MS + 4_000, due=1)) == 1


def test_young_window_is_left_alone() -> None:
    memory = Memory()
    wanted(memory, due=1, window={"epoch": 7})

    assert wanted(memory, now_ms=NOW_MS + HAND_OVER_AFTER_MS - 1, window={"epoch": 7}) == []


def test_busy_window_is_handed_over_once() -> None:
    memory = Memory()
    wanted(memory, due=1, window={"epoch": 7})

    later = NOW_MS + HAND_OVER_AFTER_MS
    first = wanted(memory, now_ms=later, window={"epoch": 7})
    again = wanted(memory, now_ms=later + 5_000, window={"epoch": 7})

    assert [epoch for _, epoch in first] == [7]
    assert again == []


def test_windows_stop_ten_minutes_after_the_last_work() -> None:
    memory = Memory()
    wanted(memory, due=1)
    wanted(memory, now_ms=NOW_MS + 2_000, window={"epoch": 1})

    assert wanted(memory, now_ms=NOW_MS + BUSY_FOR_MS - 1)
    assert wanted(memory, now_ms=NOW_MS + 2 * BUSY_FOR_MS) == []


def test_windows_stop_sooner_where_that_is_wanted() -> None:
    memory, jobs = Memory(), {JOB: JOBS[JOB]}
    wanted_upkeep(due(due=1), jobs, memory=memory, busy_for_ms=0)
    wanted_upkeep(due(NOW_MS + 2_000, window={"epoch": 1}), jobs, memory=memory, busy_for_ms=0)

    later = due(NOW_MS + HAND_OVER_AFTER_MS + 2_000, window={"epoch": 1})

    assert not wanted_upkeep(later, jobs, memory=memory, busy_for_ms=0)


def test_memory_survives_as_a_cursor() -> None:
    memory = Memory()
    wanted(memory, due=1, window={"epoch": 7})

    assert Memory.load(memory.dump()) == memory


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
