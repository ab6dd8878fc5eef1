"""Listeners and callers that do what they should not: nothing is lost, and nothing stands still."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.pace import Pace
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.pull_consumer import PullConsumer
from rmq_pipeline.consumer.puller import Puller
from rmq_pipeline.consumer.push_consumer import PushConsumer
from rmq_pipeline.consumer.received_message import messages_of
from rmq_pipeline.consumer.settler import Part, Settler
from rmq_pipeline.consumer.statistics import Statistics
from rmq_pipeline.errors import ConsumerUsageError, RequestError, RocketMQError
from tests.consumer.between import Between
from tests.consumer.conftest import bodies
from tests.consumer.listening import Heard, consumer, rows_of, unread
from tests.consumer.pieces import Gate
from tests.waiting import until

Make = Callable[..., Any]
ORDERS = ("concurrently", "queue", "key")


def first_time(act: Callable[[Any], Any]) -> Callable[..., Any]:
    """A listener that does something the first time, and succeeds after that."""
    calls: list[Any] = []

    def listen(_: Any, context: Any) -> Any:
        calls.append(context)
        return act(context) if len(calls) == 1 else "success"

    return listen


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_listener_that_ends_its_thread_has_failed(
    order: str, verbs: Broker, topic: Make, group: Make
) -> None:
    name, readers = topic(queues=1), group(backoff_ms=[10])
    verbs.send(name, bodies(0, 2))
    heard = Heard(first_time(lambda _: sys.exit("over")))

    with consumer(verbs, readers, name, order=order, threads=1, max_threads=1).listen(heard):
        heard.wait(2)

    assert sorted(heard.done) == [0, 1]
    assert len(heard.given) == 3


@pytest.mark.parametrize(
    ("order", "name"),
    [
        ("concurrently", "ack_index"),
        ("concurrently", "delay_level_when_next_consume"),
        ("queue", "suspend_ms"),
        ("key", "ack_index"),
        ("key", "suspend_ms"),
    ],
)
def test_a_context_with_what_is_no_number_is_a_failure_that_says_so(
    order: Any,
    name: str,
    *,
    verbs: Broker,
    topic: Make,
    group: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def set_it(context: Any) -> str:
        setattr(context, name, "3")
        return "success"

    source, readers = topic(queues=1), group(backoff_ms=[10])
    verbs.send(source, bodies(0, 1))
    heard = Heard(first_time(set_it))

    with consumer(verbs, readers, source, order=order).listen(heard):
        until(lambda: len(heard.given) == 2)

    assert [attempt for _, attempt, _ in heard.given] == [1, 2]
    assert f"the listener set {name} to '3': set a whole number" in caplog.text


def test_a_listener_may_close_its_consumer(
    order: Any, verbs: Broker, topic: Make, group: Make
) -> None:
    def close(_: Any) -> str:
        running.close()
        running.close()
        return "success"

    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 1))
    # Nothing is let go before it is done with.
    running = consumer(verbs, readers, name, order=order, pace=Pace())
    with running.listen(Heard(first_time(close))):
        until(lambda: unread(verbs, readers) == 0)

    until(lambda: readers_of(verbs, readers) == [])


def readers_of(verbs: Broker, group: str) -> list[str]:
    return list(verbs.describe_group(group)["members"])


def test_what_waits_for_a_commit_holds_up_no_one_who_closes(
    verbs: Broker, topic: Make, group: Make
) -> None:
    def never_commit(_: Any, context: Any) -> str:
        context.auto_commit = False
        return "success"

    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 3))
    heard = Heard(never_commit)
    running = consumer(verbs, readers, name, order="queue", pace=Pace()).listen(heard).start()
    heard.wait(3)
    queues = running._running().queues

    # Not for want of patience: the queue is quiet.
    until(lambda: not queues.of_topic(name)[0]._consuming)
    assert queues.drop(MessageQueue(name, "rmq", 0))
    running.close()

    assert verbs.receive(readers, name, limit=10).num_rows == 3


def test_a_start_that_is_refused_leaves_no_threads(
    verbs: Broker, topic: Make, group: Make, tmp_path: Any
) -> None:
    name, readers = topic(), group()
    told = {"model": "broadcasting", "offsets_folder": tmp_path, "client_id": "me"}
    with consumer(verbs, readers, name, **told).listen(Heard()):
        before = set(threading.enumerate())
        with pytest.raises(ConsumerUsageError, match="client_id"):
            consumer(verbs, readers, name, **told).listen(Heard()).start()
        with pytest.raises(RocketMQError, match="AVG"):
            PushConsumer(verbs, readers, strategy="NEAREST")

        new = set(threading.enumerate()) - before
        assert not [thread for thread in new if thread.name.startswith("rmq-")]


def test_reasons_that_are_no_text_are_told_as_well_as_can_be(
    verbs: Broker, topic: Make, group: Make
) -> None:
    def fail(_: Any) -> str:
        raise FileNotFoundError("no \udcff here")

    name, readers = topic(queues=1), group(max_attempts=1)
    verbs.send(name, bodies(0, 1))

    with consumer(verbs, readers, name).listen(Heard(first_time(fail))):
        until(lambda: rows_of(verbs, "dead_letters", readers, "error_type") != [])

    assert rows_of(verbs, "dead_letters", readers, "reason") == [{"reason": "no \\udcff here"}]


@pytest.fixture
def leased(verbs: Broker, topic: Make, group: Make) -> Iterator[tuple[Any, ...]]:
    """Three messages, and who settles them through what can be broken."""
    name, readers, between = topic(queues=1), group(), Between(verbs)
    verbs.send(name, bodies(0, 3))
    queue = ProcessQueue(MessageQueue(name, "rmq", 0), now_ms=0)
    messages = messages_of(verbs.receive(readers, name), name, queues={0: queue})[0]
    queue.put(messages)
    settler = Settler(cast(Any, between), readers)
    yield between, queue, settler, readers
    settler.close(5)


def test_a_call_that_cannot_be_made_ends_no_settling(
    leased: tuple[Any, ...], verbs: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    between, queue, settler, readers = leased
    first, second, third = queue.take(1), queue.take(1), queue.take(1)
    calls: list[object] = []
    # What is refused waits until the test has looked.
    settler._refused_s = 3600.0

    def broken(_: object, receipts: object) -> None:
        calls.append(receipts)
        raise TypeError("none of it can be sent")

    with monkeypatch.context() as patch:
        patch.setattr(type(between), "ack", broken, raising=False)
        settler.settle(Part(first))
        until(lambda: calls)

    settler.settle(Part(second))

    left = [{"queue_offset": 0}, {"queue_offset": 2}]
    until(lambda: rows_of(verbs, "in_flight", readers, "queue_offset") == left)
    settler._refused_until = 0.0
    # It wakes the thread, which tells of the first as well.
    settler.settle(Part(third))
    until(lambda: rows_of(verbs, "in_flight", readers, "queue_offset") == [])


def test_what_a_pull_brings_between_a_reset_and_the_news_of_it_comes_again(
    verbs: Broker, topic: Make, group: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, known = Gate(), threading.Event()
    name, readers = topic(queues=1), group()
    verbs.send(name, bodies(0, 3))
    done = threading.Event()

    def wait(*_: Any) -> str:
        if done.is_set():
            gate.pass_through()
        return "success"

    heard = Heard(wait)
    with consumer(verbs, readers, name, order="queue").listen(heard) as running:
        heard.wait(3)
        until(lambda: unread(verbs, readers) == 0)
        rebalancer = running._running().rebalancer
        tell = rebalancer._pass_resets_on
        monkeypatch.setattr(rebalancer, "_pass_resets_on", lambda: known.is_set() and tell())
        done.set()
        verbs.reset_offset(readers, name, to_offset=0)
        assert gate.arrived.wait(30)

        known.set()
        rebalancer.rebalance_soon()
        until(lambda: running._running().queues.of_topic(name)[0]._before is not None)
        gate.open()

        until(lambda: {1, 2} <= set(heard.done[3:]))
        until(lambda: unread(verbs, readers) == 0)


def test_a_puller_that_was_stopped_leaves_nothing_leased_behind_its_successor(
    verbs: Broker, topic: Make, group: Make
) -> None:
    name, readers, between = topic(queues=1), group(), Between(verbs, only=("receive",))
    # A pull is under way when the puller is stopped.
    gate = between.gate = Gate()
    heard = Heard()
    told = {"order": "queue", "poll_ms": 1_000}
    with consumer(cast(Any, between), readers, name, **told).listen(heard) as running:
        parts = running._running()
        assert gate.arrived.wait(30)
        puller: Puller = parts._pullers[name]
        queue = parts.queues.of_topic(name)[0]
        puller._stopped = True
        verbs.send(name, bodies(0, 3))
        gate.open()
        until(lambda: not puller._thread.is_alive())

        assert parts.queues.of_topic(name)[0] is not queue
        parts._pull(parts._subscriptions[name])
        heard.wait(3)

    assert heard.bodies == [0, 1, 2]


def test_a_moment_is_not_a_rate() -> None:
    statistics = Statistics(ManualClock().now_ms)
    statistics.pulled("t", messages=1_000, took_ms=1.0)
    statistics.pulled("t", messages=1_000, took_ms=1.0)

    assert statistics.report("t")["pulled_per_s"] == 2_000


def test_a_pull_consumer_refuses_what_would_never_rest(
    verbs: Broker, topic: Make, group: Make
) -> None:
    readers = group()
    with pytest.raises(RequestError, match="auto_commit_ms"):
        PullConsumer(verbs, readers, auto_commit_ms=0)
    with PullConsumer(verbs, readers) as reader:
        reader.subscribe(topic())
        with pytest.raises(ConsumerUsageError, match="limit"):
            reader.poll(1.0, limit=0)
