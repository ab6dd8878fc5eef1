"""Topics come and go while messages are pulled: no pull outlives them, and none overtakes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.puller import Leasing, Puller
from rmq_pipeline.consumer.push_consumer import PushConsumer
from rmq_pipeline.consumer.rebalancing import Rebalancer
from rmq_pipeline.errors import ConsumerUsageError, StorageError
from tests.consumer.between import Between
from tests.consumer.conftest import FAST, SMALL, bodies
from tests.consumer.pieces import Gate
from tests.waiting import until


@pytest.fixture
def broker(home: Path) -> Iterator[Broker]:
    with Broker.open(home, upkeep="none", settings=SMALL) as broker:
        for topic in ("t", "u"):
            broker.create_topic(topic, queues=1)
        broker.create_group("g")
        yield broker


class Numbers:
    """A listener that remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def __call__(self, messages: Any, _context: object) -> str:
        self.given.extend(int(message.body) for message in messages)
        return "success"


def consumer(verbs: object, *topics: str, **settings: Any) -> PushConsumer:
    chosen = {"order": "queue", "threads": 1, "poll_ms": 50, "pace": FAST, **settings}
    made = PushConsumer(cast(Broker, verbs), "g", **chosen)
    for topic in topics:
        made.subscribe(topic)
    return made


def puller(running: PushConsumer, topic: str) -> threading.Thread:
    """Who pulls a topic."""
    return running._running()._pullers[topic]._thread


def test_a_pull_that_waits_has_ended_before_its_queues_are_let_go(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls = []
    unsubscribe = Rebalancer.unsubscribe

    def noted(rebalancer: Rebalancer, topic: str) -> None:
        pulls.append(thread.is_alive())
        unsubscribe(rebalancer, topic)

    monkeypatch.setattr(Rebalancer, "unsubscribe", noted)
    with consumer(broker, "t", "u").listen(Numbers()) as running:
        thread = puller(running, "t")
        until(lambda: len(running.owned()) == 2)

        running.unsubscribe("t")

    assert pulls == [False]


def test_what_was_pulled_before_a_topic_went_and_came_is_not_overtaken(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, answered = Gate(), threading.Event()
    pull, stop = Leasing.pull, Puller.stop

    def slowly(leasing: Leasing, *args: Any, **how: Any) -> pa.Table:
        table = pull(leasing, *args, **how)
        if table.num_rows and not answered.is_set():
            answered.set()
            slow.pass_through()
        return table

    def until_it_has_ended(puller: Puller, timeout_s: float = 0.0) -> None:
        if timeout_s:
            slow.open()
        stop(puller, timeout_s)

    monkeypatch.setattr(Leasing, "pull", slowly)
    monkeypatch.setattr(Puller, "stop", until_it_has_ended)
    numbers = Numbers()
    with consumer(broker, "t", "u").listen(numbers) as running:
        broker.send("t", bodies(0, 1))
        assert slow.arrived.wait(30)

        running.unsubscribe("t")
        running.subscribe("t")
        broker.send("t", bodies(1, 4))
        until(lambda: len(numbers.given) >= 3)
        slow.open()
        until(lambda: 0 in numbers.given)

        until(lambda: len(numbers.given) >= 4)
    assert numbers.given == [0, 1, 2, 3]


def test_what_was_leased_of_a_queue_without_its_lock_is_for_others(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull, leased = Leasing.pull, threading.Event()

    def too_late(leasing: Leasing, subscription: Any, queues: Any, **how: Any) -> pa.Table:
        """The queue is unlocked while the pull waits, and then a message comes."""
        running.unsubscribe("t")
        until(lambda: not running.owned() and not broker.describe_group("g")["locks"])
        broker.send("t", bodies(0, 1))
        table = pull(leasing, subscription, list(map(sure, queues)), **how)
        assert table.num_rows == 1
        leased.set()
        return table

    monkeypatch.setattr(Leasing, "pull", too_late)
    running = consumer(broker, "t").listen(Numbers())
    with running:
        assert leased.wait(30)

        until(lambda: broker.receive("g", "t").num_rows == 1)


def sure(held: ProcessQueue) -> ProcessQueue:
    """A queue as a pull saw it that was made before it was dropped."""
    return ProcessQueue(held.queue, now_ms=0)


def test_a_pull_ends_also_when_the_heartbeat_fails(broker: Broker) -> None:
    between = Between(broker, only=("heartbeat",))
    with consumer(between, "t", "u").listen(Numbers()) as running:
        thread = puller(running, "t")
        between.refusal = StorageError("The disk is full.")

        with pytest.raises(StorageError):
            running.unsubscribe("t")

        assert not thread.is_alive()
        between.refusal = None


@pytest.mark.parametrize("asks", ["listener", "key"])
def test_who_works_on_messages_may_unsubscribe(broker: Broker, asks: str) -> None:
    left = threading.Event()

    def leave(*_: Any) -> str:
        if not left.is_set():
            running.unsubscribe("t")
            left.set()
        return "success"

    given: dict[str, Any] = {"key": leave} if asks == "key" else {}
    running = consumer(broker, "t", "u", order="key", close_timeout_s=1, **given)
    running.listen(leave if asks == "listener" else Numbers())
    with running:
        broker.send("t", bodies(0, 1))

        assert left.wait(30)
        until(lambda: [queue.topic for queue in running.owned()] == ["u"])


def test_nothing_is_left_of_a_topic_that_came_while_the_consumer_was_closed(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, before = Gate(), set(threading.enumerate())
    describe = Broker.describe_topic

    def held_up(verbs: Broker, topic: str) -> Any:
        if topic == "u":
            gate.pass_through()
        return describe(verbs, topic)

    monkeypatch.setattr(Broker, "describe_topic", held_up)
    running = consumer(broker, "t").listen(Numbers()).start()
    with ThreadPoolExecutor() as threads:
        subscribed = threads.submit(running.subscribe, "u")
        assert gate.arrived.wait(30)

        running.close()
        gate.open()

        with pytest.raises(ConsumerUsageError):
            subscribed.result(30)
    assert broker.describe_group("g")["members"] == {}
    assert not {t.name for t in set(threading.enumerate()) - before if "pull" in t.name}
