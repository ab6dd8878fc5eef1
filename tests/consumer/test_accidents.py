"""Failures of a push consumer that must stop no queue and no key permanently."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.message_queue import BROKER_NAME, MessageQueue, Subscription
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.puller import Leasing
from rmq_pipeline.consumer.push_consumer import PushConsumer
from rmq_pipeline.errors import QueueLockedError, StorageError
from rmq_pipeline.verbs import Verbs
from tests.consumer.between import Between
from tests.consumer.conftest import FAST, SMALL, bodies
from tests.consumer.pieces import Gate
from tests.waiting import until

#: Orders of work, and of their groups.
ORDERS = [("concurrently", "none"), ("queue", "none"), ("queue", "queue"), ("key", "message_group")]
QUEUES = 2


@pytest.fixture
def broker(home: Path) -> Iterator[Broker]:
    with Broker.open(home, upkeep="none", settings=SMALL) as broker:
        broker.create_topic("t", queues=QUEUES, type="fifo")
        yield broker


def consumer(broker: Broker, order: Any, **settings: Any) -> PushConsumer:
    settings = {"poll_ms": 50, "threads": 2, "pace": FAST, "close_timeout_s": 2, **settings}
    return PushConsumer(broker, "g", order=order, **settings).subscribe("t")


class WordlessError(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise TypeError("no words")


@pytest.mark.parametrize(("order", "group_order"), ORDERS)
def test_an_error_that_cannot_be_told_is_one_like_any_other(
    broker: Broker, order: str, group_order: str
) -> None:
    broker.create_group("g", order=group_order, backoff={"initial_ms": 10})
    done: list[int] = []
    failed = threading.Event()

    def listener(messages: Any, _context: object) -> str:
        if not failed.is_set():
            failed.set()
            raise WordlessError
        done.extend(int(message.body) for message in messages)
        return "success"

    with consumer(broker, order, suspend_ms=10).listen(listener):
        broker.send("t", bodies(0, 5, message_group="x"))
        until(lambda: set(done) == set(range(5)))


@pytest.mark.parametrize(("order", "group_order"), ORDERS[1:])
def test_a_receive_that_failed_after_it_leased_overtakes_nothing(
    broker: Broker, order: str, group_order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_group("g", order=group_order)
    receive, failed = Broker.receive, threading.Event()

    def once(self: Broker, *args: Any, **how: Any) -> pa.Table:
        received = receive(self, *args, **how)
        if received.num_rows and not failed.is_set():
            failed.set()
            raise StorageError("The answer got lost on its way.")
        return received

    monkeypatch.setattr(Broker, "receive", once)
    done: list[int] = []

    def listener(messages: Any, _context: object) -> str:
        done.extend(int(message.body) for message in messages)
        return "success"

    with consumer(broker, order).listen(listener):
        broker.send("t", bodies(0, 2, message_group="x"))
        assert failed.wait(30)
        broker.send("t", bodies(2, 4, message_group="x"))
        until(lambda: len(done) >= 4)
    assert done == [0, 1, 2, 3]


def group_of(broker: Broker, queue_id: int) -> str:
    """A message group of this queue."""
    broker.create_topic("probe", queues=QUEUES, type="fifo")
    for name in (f"key-{n}" for n in range(100)):
        sent = broker.send("probe", bodies(0, 1, message_group=name))
        if sent["queue_id"][0].as_py() == queue_id:
            return name
    raise AssertionError(queue_id)


@pytest.mark.parametrize(("order", "group_order"), [ORDERS[1], ORDERS[3]])
def test_a_pull_from_before_a_queue_moved_to_and_fro_overtakes_nothing(
    broker: Broker, order: str, group_order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_group("g", order=group_order)
    both = threading.Event()
    pull = Leasing.pull

    def noting(self: Leasing, subscription: Any, queues: Any, **how: Any) -> pa.Table:
        if self._client_id == "a" and len(queues) == QUEUES and how["wait_ms"] > 1_000:
            both.set()
        return pull(self, subscription, queues, **how)

    monkeypatch.setattr(Leasing, "pull", noting)
    done: list[int] = []

    def listener(messages: Any, _context: object) -> str:
        done.extend(int(message.body) for message in messages)
        return "success"

    first = consumer(broker, order, client_id="a", poll_ms=3_000).listen(listener)
    other = consumer(broker, order, client_id="b").listen(listener)
    with first:
        until(lambda: len(first.owned()) == QUEUES)
        assert both.wait(30)
        with other:
            until(lambda: len(first.owned()) == len(other.owned()) == 1)
            (moved,) = other.owned()
            other.unsubscribe("t")
            until(lambda: len(first.owned()) == QUEUES)
            name = group_of(broker, moved.queue_id)
            for n in range(8):
                broker.send("t", bodies(n, n + 1, message_group=name))
            until(lambda: len(done) >= 8)
    assert done == list(range(8))


def test_no_pull_is_left_when_one_hung_while_the_consumer_was_closed(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_group("g")
    pace = replace(FAST, pulls_ms=50, pull_expiry_ms=300)
    pull = Leasing.pull
    hung, replaced = threading.Event(), threading.Event()

    def hanging(self: Leasing, *args: Any, **how: Any) -> pa.Table:
        if hung.is_set():
            replaced.set()
        else:
            hung.set()
            assert replaced.wait(3)  # ten times as long as a pull may take
        return pull(self, *args, **how)

    monkeypatch.setattr(Leasing, "pull", hanging)
    before = set(threading.enumerate())
    listening = consumer(broker, "concurrently", close_timeout_s=30, pace=pace)
    with listening.listen(lambda _messages, _context: "success"):
        assert hung.wait(30)

    until(lambda: not {t for t in set(threading.enumerate()) - before if "pull" in t.name})


def leasing(verbs: object) -> Leasing:
    """Of member "a", which waits for nothing."""
    return Leasing(
        cast(Verbs, verbs), "g", client_id="a", lease_ms=60_000, restart=lambda _queue: None
    )


def owned(broker: Broker) -> list[ProcessQueue]:
    """Both queues, which member "a" has locked; it is unsure of the second."""
    broker.create_group("g")
    broker.lock_queues("g", "t", queue_ids=[0, 1], client_id="a")
    queues = [ProcessQueue(MessageQueue("t", BROKER_NAME, n), now_ms=0) for n in (0, 1)]
    queues[1].unsure = True
    return queues


def test_only_the_queue_that_another_locked_meanwhile_is_let_be(broker: Broker) -> None:
    queues = owned(broker)

    with pytest.raises(QueueLockedError) as refused:
        leasing(Snatching(broker)).pull(Subscription("t"), queues, limit=1, max_bytes=1, wait_ms=0)

    assert refused.value.queue_id == 1


def test_a_queue_that_is_dropped_while_it_is_locked_again_does_not_stay_locked(
    broker: Broker,
) -> None:
    _, queue = owned(broker)
    broker.send("t", bodies(0, 9, message_group=group_of(broker, 1)))
    between = Between(broker, only=("lock_queues",))
    between.gate = gate = Gate()
    with ThreadPoolExecutor() as threads:
        pull = threads.submit(
            leasing(between).pull, Subscription("t"), [queue], limit=1, max_bytes=1, wait_ms=0
        )
        assert gate.arrived.wait(30)

        queue.drop()
        was_quiet = queue.is_quiet
        gate.open()

        assert pull.result(30).num_rows == 0
    assert not was_quiet
    assert queue.is_quiet
    assert broker.lock_queues("g", "t", queue_ids=[1], client_id="b") == [1]


def test_a_queue_that_was_dropped_is_not_locked_again(broker: Broker) -> None:
    _, queue = owned(broker)
    broker.send("t", bodies(0, 9, message_group=group_of(broker, 1)))
    queue.drop()
    broker.unlock_queues("g", "t", queue_ids=[1], client_id="a")

    pulled = leasing(broker).pull(Subscription("t"), [queue], limit=1, max_bytes=1, wait_ms=0)

    assert pulled.num_rows == 0
    assert broker.lock_queues("g", "t", queue_ids=[1], client_id="b") == [1]


class Snatching:
    """Verbs of a member whose queues another one locks as soon as they are free."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def unlock_queues(self, group: str, topic: str, **how: Any) -> None:
        self._broker.unlock_queues(group, topic, **how)
        self._broker.lock_queues(group, topic, **{**how, "client_id": "b"})
