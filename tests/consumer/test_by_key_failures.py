"""What becomes of messages that fail, by key (semantics §6.14)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from rmq_pipeline.clock import ManualClock
from rmq_pipeline.consumer.settler import Retries
from rmq_pipeline.errors import BrokerUnavailableError
from tests.consumer.keyed import Setup
from tests.consumer.pieces import Gate, received, repeat
from tests.waiting import until


@pytest.fixture
def setups() -> Iterator[list[Setup]]:
    made: list[Setup] = []
    yield made
    for each in made:
        each.timetable.close()
        assert each.workers.close(30)


def test_a_failed_batch_is_tried_again_in_place_after_a_pause(setups: list[Setup]) -> None:
    failed = [False]

    def fail(_messages: Any, context: Any) -> str:
        if context.key == "a" and not failed[0]:
            failed[0] = True
            raise ValueError("once")
        return "success"

    setup = Setup(fail)
    setups.append(setup)
    setup.arrive("aab")

    assert setup.suspended_ms() == 1000
    until(lambda: setup.queue.count == 2)
    setup.clock.advance(1000)
    setup.ended()

    assert setup.of("a") == [[0], [0], [1]]
    assert setup.settled.offsets("retry") == []
    assert setup.statistics.totals("flights").failed == 1


def test_a_call_whose_end_is_not_understood_is_a_failure_and_the_key_goes_on(
    setups: list[Setup], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup(lambda *_: "success", batch=2)
    setups.append(setup)
    count = setup.statistics.consumed

    def fail(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(setup.statistics, "consumed", count)
        raise RuntimeError("once")

    monkeypatch.setattr(setup.statistics, "consumed", fail)
    setup.arrive("aaa")

    assert setup.suspended_ms() == 1000
    setup.clock.advance(1000)
    setup.ended()

    assert setup.of("a") == [[0, 1], [0, 1], [2]]
    assert setup.settled.offsets("ack") == [0, 1, 2]
    assert "a key of flights pauses" in caplog.text


def test_a_listener_may_say_how_long_its_key_pauses(setups: list[Setup]) -> None:
    def fail(_messages: Any, context: Any) -> str:
        context.suspend_ms = 70
        return "reconsume_later"

    setup = Setup(fail)
    setups.append(setup)
    setup.arrive("a")

    assert setup.suspended_ms() == 70


def test_a_key_pauses_as_long_as_its_group_waits_and_the_broker_counts(
    setups: list[Setup],
) -> None:
    def fail(_messages: Any, _context: Any) -> str:
        raise ConnectionError("no database")

    setup = Setup(fail, max_attempts=4, suspend_ms=None, backoff_ms=(10_000, 30_000))
    setups.append(setup)
    setup.arrive("a")

    def counted(failures: int) -> bool:
        return len(setup.settled.counted) == failures

    paused = []
    for failures in (1, 2, 3):
        until(partial(counted, failures))
        paused.append(setup.suspended_ms())
        if failures == 2:
            setup.group["backoff_ms"] = [10_000, 30_000, 7_200_000]  # altered meanwhile
        setup.clock.advance(paused[-1])
    setup.ended()

    assert paused == [10_000, 30_000, 7_200_000]
    assert setup.settled.counted == [(0, "no database")] * 3
    assert setup.settled.offsets("give_up") == [0]


@pytest.mark.parametrize(("suspend_ms", "pause_ms"), [(None, 60_000), (2000, 2000)])
def test_a_pause_of_minus_one_is_the_usual_one(
    suspend_ms: int | None, pause_ms: int, setups: list[Setup]
) -> None:
    def fail(_messages: Any, context: Any) -> str:
        context.suspend_ms = -1  # RocketMQ's default
        return "suspend"

    setup = Setup(fail, suspend_ms=suspend_ms, backoff_ms=(60_000,))
    setups.append(setup)
    setup.arrive("a")

    assert setup.suspended_ms() == pause_ms


def test_a_group_that_cannot_be_asked_keeps_its_retries() -> None:
    clock = ManualClock()

    def away() -> dict[str, Any]:
        raise BrokerUnavailableError("away")

    known = {"max_attempts": 5, "backoff": {"initial_ms": 20, "max_ms": 50, "multiplier": 2}}
    retries = Retries(away, known={**known, "backoff_ms": [1]}, clock=clock)
    clock.advance(60_000)

    assert [retries.delay_ms(n) for n in (1, 2, 3)] == [20, 40, 50]
    assert retries.max_attempts == 5


def test_the_last_attempt_gives_the_message_up_and_the_key_goes_on(setups: list[Setup]) -> None:
    attempts: list[int] = []

    def fail(messages: Any, _context: Any) -> str:
        if messages[0].queue_offset == 0:
            attempts.append(messages[0].delivery_attempt)
            raise ValueError("never")
        return "success"

    setup = Setup(fail, max_attempts=3)
    setups.append(setup)
    setup.arrive("aa")
    setup.go_on()

    assert attempts == [1, 2, 3]
    (given_up,) = [part for part in setup.settled.parts if part.outcome == "give_up"]
    assert (given_up.reason, given_up.error_type) == ("never", "ValueError")
    assert setup.settled.offsets("ack") == [1]


def test_attempts_that_the_broker_counted_count(setups: list[Setup]) -> None:
    setup = Setup(lambda *_: "reconsume_later", max_attempts=3)
    setups.append(setup)
    messages = received(setup.queue, [0], message_group=["a"], delivery_attempt=3)

    setup.service.arrived(setup.queue, messages)
    setup.ended()

    assert setup.settled.offsets("give_up") == [0]


def test_what_failed_as_a_batch_is_tried_one_by_one_so_only_the_bad_one_goes(
    setups: list[Setup],
) -> None:
    def fail(messages: Any, _context: Any) -> str:
        return "reconsume_later" if any(m.queue_offset == 1 for m in messages) else "success"

    setup = Setup(fail, batch=3, max_attempts=2)
    setups.append(setup)
    setup.arrive("aaaaa")
    setup.go_on()

    assert setup.of("a") == [[0, 1, 2], [0], [1], [2], [3, 4]]
    assert setup.settled.offsets("give_up") == [1]
    assert setup.settled.offsets("ack") == [0, 2, 3, 4]


def test_what_failed_as_a_batch_stays_one_by_one_while_it_may_not_be_given(
    setups: list[Setup],
) -> None:
    def fail(messages: Any, _context: Any) -> str:
        setup.locked = False
        return "reconsume_later" if len(messages) > 1 else "success"

    setup = Setup(fail, batch=3)
    setups.append(setup)
    setup.arrive("aaa")
    until(lambda: setup.timetable._due)
    line = setup.service._lines["flights", "a"]
    looks = line.pause + 5  # each finds the queue not held
    repeat(lambda: setup.clock.advance(1000), lambda: line.pause >= looks)
    assert len(setup.calls) == 1

    def unlock() -> None:
        setup.locked = True
        setup.clock.advance(1000)

    repeat(unlock, lambda: setup.queue.count == 0)
    assert setup.of("a") == [[0, 1, 2], [0], [1], [2]]


def test_the_ack_index_settles_the_first_and_keeps_the_rest(setups: list[Setup]) -> None:
    indexes = iter([1, 0])

    def some(_messages: Any, context: Any) -> str:
        context.ack_index = next(indexes)
        return "success"

    setup = Setup(some, batch=3)
    setups.append(setup)
    setup.arrive("aaa")

    setup.clock.advance(setup.suspended_ms())
    setup.ended()

    assert setup.of("a") == [[0, 1, 2], [2]]
    assert setup.settled.offsets("ack") == [0, 1, 2]


def test_what_the_broker_takes_back_behind_a_message_is_not_given(setups: list[Setup]) -> None:
    setup = Setup(lambda *_: None, max_attempts=1, gives_back_behind=True)
    setups.append(setup)
    gate = Gate()
    setup.workers.hold()
    setup.arrive("aab")
    setup.workers.go_on()
    gate.open()
    setup.ended()

    assert sorted(setup.calls, key=str) == [("a", [0]), ("b", [2])]
    assert sorted(setup.settled.offsets("give_up")) == [0, 2]
