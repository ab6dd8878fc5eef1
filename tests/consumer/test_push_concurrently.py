"""A push consumer in no order, against a broker (semantics §6.6, §6.8)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import SystemClock
from rmq_pipeline.consumer.process_queue import Thresholds
from rmq_pipeline.consumer.push_consumer import PushConsumer
from rmq_pipeline.errors import BrokerUnavailableError
from tests.consumer.between import Between
from tests.consumer.conftest import FAST, bodies
from tests.consumer.listening import Heard, consumer, rows_of, unread
from tests.consumer.pieces import Gate
from tests.waiting import until

Make = Callable[..., Any]


def test_every_message_of_several_topics_is_given_once(
    verbs: Broker, topic: Make, group: Make
) -> None:
    one, two, readers = topic(queues=2), topic(queues=2), group()
    verbs.send(one, bodies(0, 200))
    verbs.send(two, bodies(200, 300))
    heard = Heard()

    with consumer(verbs, readers, one, two, batch=7).listen(heard) as running:
        heard.wait(300)
        verbs.send(two, bodies(300, 310))
        heard.wait(310)
        until(lambda: running.statistics(one).consumed == 200)

    assert sorted(heard.bodies) == list(range(310))
    assert max(heard.sizes) == 7
    assert unread(verbs, readers) == 0


def test_a_batch_is_one_message_and_there_are_twenty_threads_unless_said_otherwise() -> None:
    settings = PushConsumer(cast(Any, None), "g")._settings

    assert (settings.threads, settings.batch) == (20, 1)
    assert settings.consume_timeout_ms == 15 * 60 * 1000
    assert settings.order == "concurrently"


def test_what_fails_comes_again_and_its_reason_is_kept(
    verbs: Broker, topic: Make, group: Make
) -> None:
    def fail(messages: Any, _context: Any) -> str:
        if messages[0].delivery_attempt == 1:
            raise ValueError("gate 7 is shut")
        return "success"

    name, readers = topic(queues=1), group(backoff_ms=[1])
    verbs.send(name, bodies(0, 1))
    heard = Heard(fail)
    between = Between(verbs, only=("receive",))
    first, second = Gate(), Gate()
    between.gate = first

    retrying: list[dict[str, Any]] = []

    def look() -> bool:
        retrying[:] = rows_of(verbs, "retrying", readers, "reason, error_type")
        return bool(retrying)

    with consumer(cast(Broker, between), readers, name).listen(heard):
        assert first.arrived.wait(30)
        between.gate = second
        first.open()
        # The view has the row until the message is received again.
        until(look)
        second.open()
        heard.wait(1)

    assert retrying == [{"reason": "gate 7 is shut", "error_type": "ValueError"}]
    assert [attempt for _, attempt, _ in heard.given] == [1, 2]


@pytest.mark.parametrize("answer", ["reconsume_later", None])
def test_attempts_that_are_used_up_end_in_the_dead_letters(
    answer: str | None, verbs: Broker, topic: Make, group: Make
) -> None:
    name, readers = topic(queues=1), group(max_attempts=3, backoff_ms=[1])
    verbs.send(name, bodies(0, 1))
    heard = Heard(lambda *_: answer)

    with consumer(verbs, readers, name).listen(heard):
        until(lambda: rows_of(verbs, "dead_letters", readers, "reason"))

    assert [attempt for _, attempt, _ in heard.given] == [1, 2, 3]


def test_a_listener_may_send_to_the_dead_letters_at_once(
    verbs: Broker, topic: Make, group: Make
) -> None:
    def rejected(_messages: Any, context: Any) -> str:
        context.delay_level_when_next_consume = -1
        raise ValueError("rejected")

    name, readers = topic(queues=1), group(on_failure="park")
    verbs.send(name, bodies(0, 1))

    with consumer(verbs, readers, name).listen(Heard(rejected)):
        until(lambda: rows_of(verbs, "dead_letters", readers, "reason"))

    assert rows_of(verbs, "dead_letters", readers, "reason") == [{"reason": "rejected"}]


def test_the_ack_index_settles_a_part_of_a_call(verbs: Broker, topic: Make, group: Make) -> None:
    def half(messages: Any, context: Any) -> str:
        if len(messages) == 4:
            context.ack_index = 1
        return "success"

    name, readers = topic(queues=1), group(backoff_ms=[1])
    verbs.send(name, bodies(0, 4))
    heard = Heard(half)

    with consumer(verbs, readers, name, batch=4).listen(heard):
        until(lambda: len(heard.given) == 6 and unread(verbs, readers) == 0)

    assert heard.bodies[:4] == [0, 1, 2, 3]
    assert sorted(heard.bodies[4:]) == [2, 3]


def test_a_call_that_takes_too_long_is_sent_back_and_its_answer_ignored(
    verbs: Broker, topic: Make, group: Make
) -> None:
    gate = Gate()

    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 1))
    heard = Heard(gate.hang)

    with consumer(verbs, readers, name, consume_timeout_ms=50).listen(heard):
        until(lambda: rows_of(verbs, "retrying", readers, "reason"))
        gate.open()
        heard.wait(1)

    assert rows_of(verbs, "retrying", readers, "reason, error_type") == [
        {"reason": "the listener took longer than 50 ms", "error_type": "time_out"}
    ]
    assert unread(verbs, readers) == 1


def test_a_call_keeps_its_lease_however_long_it_takes(
    verbs: Broker, topic: Make, group: Make
) -> None:
    pace = replace(FAST, lease_ms=6000, lease_renew_s=0.05)
    gate = Gate()

    def hang(messages: Any, _context: Any) -> str:
        if int(messages[0].body) == 0:
            gate.pass_through()
        return "success"

    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 1))
    heard = Heard(hang)

    with consumer(verbs, readers, name, pace=pace).listen(heard):
        assert gate.arrived.wait(30)
        leased_until = rows_of(verbs, "in_flight", readers, "visible_at_ms")
        # A lease later it is still the same delivery.
        first_ms = leased_until[0]["visible_at_ms"]
        until(
            lambda: (
                rows_of(verbs, "in_flight", readers, "visible_at_ms")[0]["visible_at_ms"]
                > first_ms + 6100
            )
        )
        gate.open()
        heard.wait(1)

    assert [attempt for _, attempt, _ in heard.given] == [1]
    assert unread(verbs, readers) == 0


@pytest.mark.parametrize("start_from", ["last", "first", "time"])
def test_a_new_group_begins_where_it_is_told_to(
    start_from: str, verbs: Broker, topic: Make, group: Make
) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 3))
    at_ms = 1 + verbs.read(name, 0, offset=2, limit=1)["stored_at_ms"][0].as_py()
    until(lambda: SystemClock().now_ms() > at_ms)
    verbs.send(name, bodies(3, 6))
    heard = Heard()
    where: Any = at_ms if start_from == "time" else start_from

    with consumer(verbs, readers, name, start_from=where).listen(heard) as running:
        until(running.owned)
        verbs.send(name, bodies(6, 7))
        until(lambda: 6 in heard.done)
        until(lambda: unread(verbs, readers) == 0)

    first = {"last": 6, "first": 0, "time": 3}[start_from]
    assert sorted(heard.bodies) == list(range(first, 7))


def test_a_filter_is_the_brokers(verbs: Broker, topic: Make, group: Make) -> None:
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 4, tag=["a", "b", "c", "a"]))
    heard = Heard()

    with consumer(verbs, readers).subscribe(name, "a || c").listen(heard):
        heard.wait(3)

    assert sorted(heard.bodies) == [0, 2, 3]


def test_topics_come_and_go_while_it_runs(verbs: Broker, topic: Make, group: Make) -> None:
    one, two, readers = topic(queues=1), topic(queues=1), group()
    heard = Heard()

    with consumer(verbs, readers, one).listen(heard) as running:
        running.subscribe(two)
        verbs.send(two, bodies(0, 1))
        heard.wait(1)
        running.unsubscribe(one)
        until(lambda: {queue.topic for queue in running.owned()} == {two})
        verbs.send(one, bodies(1, 2))
        verbs.send(two, bodies(2, 3))
        heard.wait(2)

    assert heard.bodies == [0, 2]


def test_a_topic_that_cannot_be_subscribed_to_while_it_runs_is_not(
    verbs: Broker, topic: Make, group: Make
) -> None:
    name, other, readers = topic(queues=1), topic(queues=1), group()
    between, heard = Between(verbs, only=("heartbeat",)), Heard()

    with consumer(cast(Any, between), readers, name).listen(heard) as running:
        until(running.owned)
        between.refusal = BrokerUnavailableError("It is away.")
        with pytest.raises(BrokerUnavailableError):
            running.subscribe(other)
        between.refusal = None
        verbs.send(other, bodies(7, 8))
        verbs.send(name, bodies(0, 1))
        heard.wait(1)
        assert heard.bodies == [0]
        until(
            lambda: verbs.describe_group(readers)["members"][running.client_id]["topics"] == [name]
        )
        running.subscribe(other)
        heard.wait(2)

    assert heard.bodies == [0, 7]


def test_no_more_is_held_than_the_threshold(verbs: Broker, topic: Make, group: Make) -> None:
    gate = Gate()

    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 500))
    heard = Heard(gate.hang)

    with consumer(verbs, readers, name, thresholds=Thresholds(messages=60)).listen(heard):
        assert gate.arrived.wait(30)
        until(lambda: len(rows_of(verbs, "in_flight", readers, "queue_offset")) >= 30)
        most = len(rows_of(verbs, "in_flight", readers, "queue_offset"))
        gate.open()
        heard.wait(500)

    assert 30 <= most <= 60


def test_offsets_held_are_no_further_apart_than_the_threshold(
    verbs: Broker, topic: Make, group: Make
) -> None:
    gate = Gate()

    def hang(messages: Any, _context: Any) -> str:
        if int(messages[0].body) == 0:
            gate.pass_through()
        return "success"

    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 500))
    heard = Heard(hang)
    thresholds = Thresholds(messages=40, span=100)

    with consumer(verbs, readers, name, thresholds=thresholds).listen(heard):
        heard.wait(100)
        stopped = threading.Event()
        until(lambda: not stopped.wait(0.2))
        far = max(heard.bodies)
        gate.open()
        heard.wait(500)

    assert 100 <= far <= 140
