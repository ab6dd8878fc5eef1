"""The threads that call a listener."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rmq_pipeline.consumer.workers import Workers
from tests.consumer.pieces import Gate, repeat
from tests.waiting import until


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(2, most=4, stuck_after_ms=1, name="test")
    yield workers
    assert workers.close(30)


def test_turns_are_taken_in_their_order() -> None:
    workers = Workers(1, most=1, stuck_after_ms=1000, name="test")
    done: list[int] = []
    for i in range(100):
        workers.submit(lambda i=i: done.append(i))  # type: ignore[misc]

    until(lambda: len(done) == 100)

    assert done == list(range(100))
    assert workers.close(30)


def test_as_many_turns_are_taken_at_a_time_as_there_are_threads(workers: Workers) -> None:
    both = threading.Barrier(2)
    met: list[int] = []
    for _ in range(2):
        workers.submit(lambda: met.append(both.wait(30)))

    until(lambda: len(met) == 2)

    assert workers.alive == 2


def test_turns_that_last_are_made_up_for_until_they_end(workers: Workers) -> None:
    gates = [Gate() for _ in range(4)]
    for gate in gates[:2]:
        workers.submit(gate.pass_through)
    until(lambda: all(gate.arrived.is_set() for gate in gates[:2]))

    # Before the third turn begins, which would be a long one, too.
    repeat(workers.look, lambda: workers.stuck == 2)
    workers.submit(gates[2].pass_through)
    until(gates[2].arrived.is_set)
    assert workers.alive == 4

    for gate in gates[:3]:
        gate.open()
    repeat(workers.look, lambda: workers.stuck == 0)
    repeat(lambda: workers.submit(lambda: None), lambda: workers.alive == 2)


def test_no_more_is_made_up_for_than_there_may_be(workers: Workers) -> None:
    gates = [Gate() for _ in range(5)]
    for gate in gates:
        workers.submit(gate.pass_through)

    repeat(workers.look, lambda: all(gate.arrived.is_set() for gate in gates[:4]))
    repeat(workers.look, lambda: workers.stuck == 4)

    assert workers.alive == 4
    assert not gates[4].arrived.is_set()
    for gate in gates:
        gate.open()


def test_nothing_is_begun_while_workers_are_held(workers: Workers) -> None:
    done = threading.Event()
    workers.hold()
    workers.submit(done.set)
    assert not done.wait(0.05)

    workers.go_on()

    assert done.wait(30)


def test_a_turn_that_fails_takes_no_worker_along(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    done = threading.Event()
    for _ in range(5):
        workers.submit(fail)
    workers.submit(done.set)

    assert done.wait(30)
    assert workers.alive == 2
    assert "a turn of test failed" in caplog.text


def test_no_thread_that_is_to_make_up_for_another_begins_once_it_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = Workers(1, most=2, stuck_after_ms=0, name="test")
    gate = Gate()
    workers.submit(gate.pass_through)
    assert gate.arrived.wait(30)
    start = workers._start

    def close_first() -> None:
        assert not workers.close(0)
        start()

    monkeypatch.setattr(workers, "_start", close_first)
    workers.look()
    gate.open()

    until(lambda: workers.alive == 0, within_s=60, what="each thread is told to end")


def test_closing_waits_for_what_runs_and_begins_nothing_more() -> None:
    workers = Workers(1, most=1, stuck_after_ms=1000, name="test")
    gate, later = Gate(), threading.Event()
    workers.submit(gate.pass_through)
    assert gate.arrived.wait(30)
    workers.submit(later.set)

    assert not workers.close(0.01)
    gate.open()
    assert workers.close(30)
    assert not later.is_set()
