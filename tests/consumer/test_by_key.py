"""Messages of a key one after another, of different keys at once (semantics §6.14)."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from rmq_pipeline.consumer.by_key import UNLOCKED_MS, by_keys, by_message_group
from rmq_pipeline.consumer.message_queue import MessageQueue
from tests.consumer.keyed import Setup
from tests.consumer.pieces import Gate, held_queue, received, repeat
from tests.waiting import until


@pytest.fixture
def setups() -> Iterator[list[Setup]]:
    made: list[Setup] = []
    yield made
    for each in made:
        each.timetable.close()
        assert each.workers.close(30)


def test_messages_of_a_key_are_given_in_order_whatever_else_happens(setups: list[Setup]) -> None:
    numbers = random.Random(7)
    running: dict[str, int] = defaultdict(int)
    overlaps, lock = [], threading.Lock()

    def check(messages: Any, context: Any) -> str:
        with lock:
            running[context.key] += 1
            if running[context.key] > 1:
                overlaps.append(context.key)
        with lock:
            running[context.key] -= 1
            context.ack_index = numbers.randrange(len(messages))
        return "success" if numbers.random() < 0.9 else "reconsume_later"

    setup = Setup(check, batch=3, threads=8, max_attempts=1_000_000)
    setups.append(setup)
    keys = [numbers.choice("abcdefgh") for _ in range(600)]
    for start in range(0, 600, 50):
        setup.arrive(list(keys[start : start + 50]), start)

    setup.go_on()

    assert overlaps == []
    for key in "abcdefgh":
        done = [offset for offset in setup.settled.offsets("ack") if keys[offset] == key]
        assert done == [offset for offset in range(600) if keys[offset] == key]


def test_as_many_keys_are_worked_on_at_once_as_there_are_workers(setups: list[Setup]) -> None:
    all_at_once = threading.Barrier(4)

    def meet(*_: Any) -> str:
        all_at_once.wait(30)
        return "success"

    setup = Setup(meet, threads=4)
    setups.append(setup)

    setup.arrive("abcd")
    setup.ended()

    assert sorted(setup.settled.offsets("ack")) == [0, 1, 2, 3]


def test_of_the_keys_that_stand_in_line_the_one_with_the_oldest_message_is_next(
    setups: list[Setup],
) -> None:
    gate = Gate()

    def wait(messages: Any, _context: Any) -> str:
        if messages[0].queue_offset == 0:
            gate.pass_through()
        return "success"

    setup = Setup(wait, threads=1, batch=2)
    setups.append(setup)
    setup.arrive("z")
    assert gate.arrived.wait(30)
    setup.arrive("abbbaaab", start=1)
    gate.open()
    setup.ended()

    assert setup.calls[1:] == [
        ("a", [1, 5]),
        ("b", [2, 3]),
        ("b", [4, 8]),
        ("a", [6, 7]),
    ]


def test_a_key_is_with_one_worker_whatever_the_number_of_queues(setups: list[Setup]) -> None:
    gate = Gate()

    def wait(*_: Any) -> str:
        gate.pass_through()
        return "success"

    setup = Setup(wait)
    setups.append(setup)
    other = held_queue(MessageQueue("flights", "rmq", 1))
    setup.arrive("a")
    assert gate.arrived.wait(30)
    setup.service.arrived(other, received(other, [5], message_group=["a"]))

    assert setup.calls == [("a", [0])]
    gate.open()
    until(lambda: other.count == 0)


def test_a_key_that_hangs_pauses_only_itself(setups: list[Setup]) -> None:
    gate = Gate()

    def hang(_messages: Any, context: Any) -> str:
        if context.key == "a":
            gate.pass_through()
        return "success"

    setup = Setup(hang)
    setups.append(setup)
    setup.arrive("aabcbcb")

    assert gate.arrived.wait(30)
    until(lambda: setup.queue.count == 2)

    assert setup.of("a") == [[0]]
    gate.open()
    setup.ended()
    assert setup.of("a") == [[0], [1]]


def test_messages_without_a_key_do_not_wait(setups: list[Setup]) -> None:
    both = threading.Barrier(2)

    def meet(_messages: Any, context: Any) -> str:
        assert context.key is None
        both.wait(30)
        return "success"

    setup = Setup(meet)
    setups.append(setup)

    setup.arrive([None, None])
    setup.ended()


def test_a_key_that_cannot_be_told_is_one_key(
    setups: list[Setup], caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup(lambda *_: "success", key_of=lambda message: message.keys)
    setups.append(setup)

    setup.arrive("abc")
    setup.ended()

    assert setup.settled.offsets("ack") == [0, 1, 2]
    assert "no key of <message flights/0/0>" in caplog.text


def test_keys_are_the_message_group_or_the_keys() -> None:
    one, two = received(held_queue(), [0, 1], message_group=["g", None], keys=[["k", "l"], None])

    assert (by_message_group(one), by_message_group(two)) == ("g", None)
    assert (by_keys(one), by_keys(two)) == (("k", "l"), None)


def test_several_keys_are_one_together_in_their_order(setups: list[Setup]) -> None:
    gate = Gate()

    def work(_: Any, context: Any) -> str:
        if context.key == ("k", "l"):
            gate.pass_through()
        return "success"

    setup = Setup(work, key_of=by_keys)
    setups.append(setup)
    keys = [["k", "l"], ["k"], ["l", "k"], ["k", "l"], ["l"], ["k"], None]
    setup.service.arrived(setup.queue, received(setup.queue, range(7), keys=keys))

    assert gate.arrived.wait(30)
    until(lambda: setup.queue.count == 2)
    assert setup.of(("k", "l")) == [[0]]
    gate.open()
    setup.ended()

    assert setup.of(("k", "l")) == [[0], [3]]
    assert setup.of(("k",)) == [[1], [5]]
    assert setup.of(("l", "k")) == [[2]]


def test_nothing_is_given_while_the_queue_is_not_locked(setups: list[Setup]) -> None:
    setup = Setup(lambda *_: "success")
    setups.append(setup)
    setup.locked = False
    setup.arrive("ab")

    assert setup.suspended_ms() == UNLOCKED_MS
    until(lambda: len(setup.timetable._due) == 2)
    setup.locked = True
    setup.clock.advance(UNLOCKED_MS)
    setup.ended()

    assert sorted(setup.calls, key=str) == [("a", [0]), ("b", [1])]


def test_nothing_of_a_dropped_queue_is_given(setups: list[Setup]) -> None:
    gate = Gate()

    setup = Setup(gate.hang, threads=1)
    setups.append(setup)
    setup.arrive("aab")
    assert gate.arrived.wait(30)

    left = setup.queue.drop()
    gate.open()
    setup.ended()

    assert [message.queue_offset for message in left] == [1, 2]
    assert setup.calls == [("a", [0])]


def test_workers_starve_while_fewer_keys_can_go_on_than_two_for_each(
    setups: list[Setup],
) -> None:
    setup = Setup(lambda *_: "success", threads=2)
    setups.append(setup)
    setup.workers.hold()

    assert setup.service.is_starving()
    setup.arrive("aaaa")
    assert setup.service.is_starving()
    setup.arrive("bc", start=4)
    assert setup.service.is_starving()
    setup.arrive("d", start=6)
    assert not setup.service.is_starving()
    setup.workers.go_on()
    setup.ended()
    assert setup.service.is_starving()


def test_a_key_that_pauses_or_hangs_cannot_go_on(setups: list[Setup]) -> None:
    gate = Gate()

    def wait(_messages: Any, context: Any) -> str | None:
        if context.key == "b":
            gate.pass_through()
            return "success"
        return None

    setup = Setup(wait, threads=2)
    setups.append(setup)
    setup.arrive("ab")
    assert setup.suspended_ms() == 1000
    assert gate.arrived.wait(30)

    assert setup.service._runnable == 1
    setup.workers.stuck = 1
    assert setup.service.is_starving()
    gate.open()


def paused_for_an_hour(setups: list[Setup]) -> Setup:
    """A key that pauses for its first message, whose queue was given up and came back."""

    def fail(messages: Any, _: Any) -> str | None:
        return None if messages[0].queue_offset == 0 else "success"

    setup = Setup(fail, max_attempts=17, suspend_ms=None, backoff_ms=(3_600_000,))
    setups.append(setup)
    setup.arrive("aa")
    assert setup.suspended_ms() == 3_600_000
    setup.queue.drop()
    setup.queue = held_queue()
    return setup


def test_a_key_pauses_no_longer_than_the_message_that_failed_is_held(setups: list[Setup]) -> None:
    setup = paused_for_an_hour(setups)

    setup.arrive("aa", start=1)  # another member has handled the first
    setup.ended()
    setup.clock.advance(3_600_000)  # the pause that was left does nothing more
    setup.arrive("ab", start=3)
    setup.ended()

    assert setup.of("a") == [[0], [1], [2], [3]]
    assert setup.service._runnable == 0


@pytest.mark.parametrize(("attempt", "goes_on"), [(2, False), (1, True)])
def test_a_message_that_comes_again_after_its_failure_waits_for_the_rest_of_its_pause(
    setups: list[Setup], attempt: int, goes_on: bool
) -> None:
    setup = paused_for_an_hour(setups)

    # It was reset at its first attempt, so the operator wants it now.
    again = received(setup.queue, [0, 1], message_group="a", delivery_attempt=attempt)
    setup.workers.hold()
    setup.service.arrived(setup.queue, again)
    assert setup.service._runnable == int(goes_on)
    setup.workers.go_on()

    until(lambda: setup.of("a") == [[0]] * (1 + goes_on))
    hour = 3_600_000
    repeat(lambda: setup.clock.advance(hour), lambda: len(setup.calls) > 1 + goes_on)
