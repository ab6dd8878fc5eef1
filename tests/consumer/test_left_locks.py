"""A member that could not begin with a queue does not keep its lock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.pace import Pace
from rmq_pipeline.consumer.push_consumer import PushConsumer
from rmq_pipeline.consumer.rebalancing import Rebalancer
from rmq_pipeline.errors import BusyError, RocketMQError, StorageError
from tests.consumer.conftest import FAST, SMALL, bodies
from tests.consumer.listening import Heard
from tests.waiting import until

HOUR_MS = 3_600_000


@pytest.fixture
def broker(home: Path) -> Iterator[Broker]:
    with Broker.open(home, upkeep="none", settings=SMALL) as broker:
        broker.create_topic("t", queues=4, type="fifo")
        broker.create_group("g")
        yield broker


class Refusing:
    """An owner that cannot begin with the first queue it is given."""

    def __init__(self, refusal: RocketMQError) -> None:
        self._refusal = refusal
        self.asked = 0

    def take(self, _queue: MessageQueue) -> None:
        self.asked += 1
        if self.asked == 1:
            raise self._refusal

    def drop(self, _queue: MessageQueue) -> bool:
        return True

    def reset(self, _queue: MessageQueue) -> None:
        raise AssertionError("nobody has reset anything")

    def report(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("refusal", "locked"), [(BusyError("away"), []), (StorageError("damaged"), [1, 2, 3])]
)
def test_a_queue_that_cannot_be_begun_with_is_not_locked_and_neither_is_what_follows_unowned(
    broker: Broker, refusal: RocketMQError, locked: list[int]
) -> None:
    rebalancer = Rebalancer(
        broker,
        group="g",
        client_id="a",
        topics=["t"],
        owner=Refusing(refusal),
        locking=True,
        pace=Pace(unbalanced_s=3600.0),
    )
    rebalancer.start()
    until(lambda: rebalancer.trouble is refusal)

    found = [lock["queue_id"] for lock in broker.describe_group("g")["locks"]]
    owned = [queue.queue_id for queue in rebalancer.owned()]
    rebalancer.close()

    assert found == owned == locked


@pytest.mark.parametrize("order", ["queue", "key"])
def test_a_member_that_was_killed_and_comes_back_by_its_name_gets_what_it_had(
    broker: Broker, order: Any
) -> None:
    broker.send("t", bodies(0, 10, message_group="one"))
    broker.lock_queues("g", "t", queue_ids=[0, 1, 2, 3], client_id="worker")
    had = broker.receive(
        "g", "t", limit=9, client_id="worker", invisible_duration_ms=HOUR_MS, queue_ids=[0, 1, 2, 3]
    )
    heard = Heard()

    comes_back = PushConsumer(
        cast(Any, broker), "g", order=order, client_id="worker", start_from="first", pace=FAST
    )
    with comes_back.subscribe("t").listen(heard):
        heard.wait(10)

    assert had.num_rows == 9
    assert heard.done == list(range(10))
