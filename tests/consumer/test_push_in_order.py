"""A push consumer in the order of a queue, and of a key (semantics §6.9, §6.14)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.process_queue import Thresholds
from rmq_pipeline.consumer.received_message import ReceivedMessage
from tests.consumer.between import Between
from tests.consumer.conftest import bodies
from tests.consumer.listening import Heard, consumer, rows_of, unread
from tests.consumer.pieces import Gate, repeat
from tests.waiting import until

Make = Callable[..., Any]
#: Orders of a consumer, and of its group.
ORDERS = [
    ("queue", "none"),
    ("queue", "message_group"),
    ("queue", "queue"),
    ("key", "none"),
    ("key", "message_group"),
]


def in_groups(n: int, groups: int, start: int = 0) -> Any:
    """Messages whose message groups come in turns."""
    return bodies(
        start, start + n, message_group=[f"g{i % groups}" for i in range(start, start + n)]
    )


def now_and_then(*, share: float = 0.1) -> Callable[..., str]:
    """Fails now and then, in three ways."""
    numbers, lock = random.Random(3), threading.Lock()

    def answer(*_: Any) -> Any:
        with lock:
            number = numbers.random()
        if number < share / 3:
            raise ValueError("now and then")
        if number < share:
            return None if number < 2 * share / 3 else "reconsume_later"
        return "success"

    return answer


#: How a delivery looks that has failed once where it is.
SECOND = {"delivery_attempt": 2}


@pytest.mark.parametrize(("order", "of_group"), ORDERS)
def test_order_holds_whatever_fails_and_each_message_is_done_once(
    order: Any, of_group: str, verbs: Broker, topic: Make, group: Make
) -> None:
    name, readers = topic(queues=2, type="fifo"), group(order=of_group)
    verbs.send(name, in_groups(300, 7))
    heard = Heard(now_and_then())

    with consumer(verbs, readers, name, order=order, batch=3, max_attempts=100, threads=8).listen(
        heard
    ):
        heard.wait(150)
        verbs.send(name, in_groups(100, 7, start=300))
        heard.wait(400)
        until(lambda: unread(verbs, readers) == 0)

    assert sorted(heard.done) == list(range(400))
    for key in range(7):
        done = [body for body in heard.done if body % 7 == key]
        assert done == sorted(done)


def test_a_queue_is_in_the_order_of_its_offsets(verbs: Broker, topic: Make, group: Make) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 100))
    heard = Heard(now_and_then())

    with consumer(verbs, readers, name, order="queue").listen(heard):
        heard.wait(100)

    assert heard.done == list(range(100))


def test_by_queue_a_message_that_failed_too_often_makes_way_and_ends_in_the_dead_letters(
    verbs: Broker, topic: Make, group: Make
) -> None:
    def fail(messages: Any, _context: Any) -> str:
        if int(messages[0].body) == 0:
            raise ValueError("never")
        return "success"

    name, readers = topic(queues=1), group(max_attempts=3, backoff_ms=[1])
    verbs.send(name, bodies(0, 3))
    heard = Heard(fail)

    with consumer(verbs, readers, name, order="queue", max_reconsume_times=1).listen(heard):
        heard.wait(2)
        until(lambda: rows_of(verbs, "dead_letters", readers, "reason"))

    assert heard.done == [1, 2]
    assert [attempt for body, attempt, _ in heard.given if body == 0][:2] == [1, 2]
    assert rows_of(verbs, "dead_letters", readers, "reason") == [{"reason": "never"}]


def test_without_auto_commit_only_what_was_committed_is_settled(
    verbs: Broker, topic: Make, group: Make
) -> None:
    def every_third(messages: Any, context: Any) -> str:
        context.auto_commit = False
        return "commit" if int(messages[0].body) % 3 == 2 else "success"

    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 8))
    heard = Heard(every_third)

    with consumer(verbs, readers, name, order="queue").listen(heard):
        until(lambda: len(heard.given) == 8 and unread(verbs, readers) == 2)

    again = verbs.receive(readers, name, limit=9)
    assert again["body"].to_pylist() == [b"6", b"7"]
    assert again["delivery_attempt"].to_pylist() == [1, 1]


@pytest.mark.parametrize("order", ["queue", "key"])
def test_once_another_has_the_lock_nothing_is_given_and_results_are_refused(
    order: Any, verbs: Broker, topic: Make, group: Make
) -> None:
    gate = Gate()

    def hang(messages: Any, _context: Any) -> str:
        if int(messages[0].body) == 2:
            gate.pass_through()
        return "success"

    name, readers = topic(queues=1, type="fifo"), group()
    verbs.send(name, in_groups(6, 1))
    heard = Heard(hang)

    with consumer(verbs, readers, name, order=order, client_id="first").listen(heard) as running:
        assert gate.arrived.wait(30)
        until(lambda: unread(verbs, readers) == 4)
        (before,) = running._running().queues.of_topic(name)
        # The first one renews its lock all the time: between that and the second there is a moment.
        only: Any = {"queue_ids": [0], "client_id": "second"}
        repeat(
            lambda: verbs.unlock_queues(readers, name, queue_ids=[0], client_id="first"),
            lambda: verbs.lock_queues(readers, name, **only) == [0],
        )
        got = verbs.receive(readers, name, limit=9, queue_ids=[0], client_id="second")
        until(lambda: before.dropped)
        gate.open()
        heard.wait(3)

    assert [int(body) for body in got["body"].to_pylist()] == [2, 3, 4, 5]
    assert set(got["delivery_attempt"].to_pylist()) == {1}
    assert heard.bodies == [0, 1, 2]
    verbs.ack(got)
    assert unread(verbs, readers) == 0


@pytest.mark.parametrize(("order", "of_group"), ORDERS)
@pytest.mark.parametrize("verb", ["receive", "ack"])
def test_answers_that_get_lost_cost_neither_order_nor_messages(
    verb: str, order: Any, of_group: str, verbs: Broker, topic: Make, group: Make
) -> None:
    name, readers = topic(queues=1, type="fifo"), group(order=of_group)
    between = Between(verbs, only=(verb,))
    heard = Heard()

    with consumer(
        cast(Broker, between), readers, name, order=order, thresholds=Thresholds(messages=20)
    ).listen(heard):
        for start in (0, 50, 100):
            between.lost_after = 1
            verbs.send(name, in_groups(50, 5, start=start))
            until(lambda: between.lost_after == 0)
            sent = set(range(start + 50))
            until(lambda sent=sent: set(heard.done) == sent)  # type: ignore[misc]
        until(lambda: unread(verbs, readers) == 0)

    for key in range(5):
        firsts = list(dict.fromkeys(body for body in heard.done if body % 5 == key))
        assert firsts == sorted(firsts)


@pytest.mark.parametrize("of_group", ["none", "message_group"])
def test_a_key_that_hangs_holds_up_no_other(
    of_group: str, verbs: Broker, topic: Make, group: Make
) -> None:
    gate = Gate()

    def hang(messages: Any, _context: Any) -> str:
        if messages[0].message_group == "g0":
            gate.pass_through()
        return "success"

    name, readers = topic(queues=1, type="fifo"), group(order=of_group)
    verbs.send(name, in_groups(300, 3))
    heard = Heard(hang)

    # Of the 100 messages of the key that hangs many more come than may be held without it.
    with consumer(verbs, readers, name, order="key", thresholds=Thresholds(messages=20)).listen(
        heard
    ):
        heard.wait(200)
        gate.open()
        heard.wait(300)

    assert {body % 3 for body in heard.done[:200]} == {1, 2}


def test_a_key_that_hangs_holds_ten_times_the_threshold_at_most(
    verbs: Broker, topic: Make, group: Make
) -> None:
    gate = Gate()

    name, readers = topic(queues=1, type="fifo"), group()
    verbs.send(name, bodies(0, 300, message_group="g"))
    heard = Heard(gate.hang)

    with consumer(verbs, readers, name, order="key", thresholds=Thresholds(messages=10)).listen(
        heard
    ):
        assert gate.arrived.wait(30)
        until(lambda: len(rows_of(verbs, "in_flight", readers, "queue_offset")) >= 95)
        held = len(rows_of(verbs, "in_flight", readers, "queue_offset"))
        gate.open()
        heard.wait(300)

    assert held <= 100


@pytest.mark.parametrize(
    ("on_failure", "done", "dead", "parked"),
    [
        ("dead_letter", [1, 2, 3, 4, 5], [0], []),
        ("dead_letter_group", [1, 3, 5], [0, 2, 4], []),
        ("park", [1, 3, 5], [], [0]),
    ],
)
def test_by_key_the_last_failure_ends_as_the_group_says(
    on_failure: str,
    done: list[int],
    dead: list[int],
    parked: list[int],
    verbs: Broker,
    topic: Make,
    group: Make,
) -> None:
    attempts: list[int] = []

    def fail(messages: Any, _context: Any) -> str:
        if int(messages[0].body) == 0:
            attempts.append(messages[0].delivery_attempt)
            raise ValueError("never")
        return "success"

    name = topic(queues=1, type="fifo")
    readers = group(order="message_group", max_attempts=3, on_failure=on_failure)
    verbs.send(name, in_groups(6, 2))
    heard = Heard(fail)

    with consumer(verbs, readers, name, order="key").listen(heard):
        heard.wait(len(done))
        until(lambda: len(rows_of(verbs, "dead_letters", readers, "queue_offset")) == len(dead))
        until(lambda: len(rows_of(verbs, "parked", readers, "queue_offset")) >= len(parked))

    assert attempts == [1, 2, 3]
    assert sorted(heard.done) == done


def test_by_key_attempts_are_the_brokers_over_restarts_and_in_the_dead_letters(
    verbs: Broker, topic: Make, group: Make
) -> None:
    attempts: list[int] = []

    def fail(messages: Any, _context: Any) -> str:
        attempts.append(messages[0].delivery_attempt)
        raise ConnectionError("no database")

    name, readers = topic(queues=1, type="fifo"), group(max_attempts=4, backoff_ms=[1])
    verbs.send(name, in_groups(1, 1))
    for until_attempt in (2, 4):
        settings = {"order": "key", "suspend_ms": None if until_attempt == 4 else 30_000}
        with consumer(verbs, readers, name, **settings).listen(Heard(fail)):
            if until_attempt == 2:
                until(lambda: attempts == [1])
                until(lambda: rows_of(verbs, "in_flight", readers, "delivery_attempt")[0] == SECOND)
            else:
                until(lambda: rows_of(verbs, "dead_letters", readers, "attempts, reason"))

    assert attempts == [1, 2, 3, 4]
    (letter,) = rows_of(verbs, "dead_letters", readers, "attempts, reason")
    assert letter == {"attempts": 4, "reason": "no database"}


def test_by_key_of_ones_own(verbs: Broker, topic: Make, group: Make) -> None:
    def by_sender(message: ReceivedMessage) -> str:
        return message.properties["sender"]

    name, readers = topic(queues=1), group()
    senders = [[("sender", f"s{i % 5}")] for i in range(100)]
    verbs.send(name, bodies(0, 100, properties=senders))
    heard = Heard(now_and_then())

    with consumer(verbs, readers, name, order="key", key=by_sender, max_attempts=100).listen(heard):
        heard.wait(100)

    for key in range(5):
        done = [body for body in heard.done if body % 5 == key]
        assert done == list(range(key, 100, 5))


@pytest.mark.parametrize(("order", "of_group"), ORDERS)
def test_queues_change_hands_in_order_without_a_duplicate(
    order: Any, of_group: str, verbs: Broker, topic: Make, group: Make
) -> None:
    name, readers = topic(queues=4, type="fifo"), group(order=of_group)
    heard = Heard()
    one = consumer(verbs, readers, name, order=order, batch=2).listen(heard)
    two = consumer(verbs, readers, name, order=order, batch=2).listen(heard)
    with one, two:
        verbs.send(name, in_groups(200, 16))
        heard.wait(100)
        two.close()
        verbs.send(name, in_groups(200, 16, start=200))
        heard.wait(300)
        with consumer(verbs, readers, name, order=order).listen(heard):
            verbs.send(name, in_groups(200, 16, start=400))
            heard.wait(600)
            until(lambda: unread(verbs, readers) == 0)

    assert sorted(heard.bodies) == list(range(600))
    for key, given in heard.by_group().items():
        assert given == sorted(given), key


@pytest.mark.parametrize("order", ["queue", "key"])
def test_a_reset_is_followed_in_order(order: Any, verbs: Broker, topic: Make, group: Make) -> None:
    name, readers = topic(queues=1, type="fifo"), group()
    verbs.send(name, bodies(0, 20, message_group="g"))
    heard = Heard()

    with consumer(verbs, readers, name, order=order).listen(heard):
        heard.wait(20)
        until(lambda: unread(verbs, readers) == 0)
        verbs.reset_offset(readers, name, to_offset=5)
        heard.wait(35)

    assert heard.bodies == [*range(20), *range(5, 20)]
