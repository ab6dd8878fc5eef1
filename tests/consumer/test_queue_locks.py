"""A lock is trusted for half of the time that it holds at the broker."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.consumer.message_queue import MessageQueue, queues_of
from rmq_pipeline.consumer.queue_locks import QueueLocks
from tests.consumer.conftest import SMALL, bodies

QUEUES = queues_of("orders", 3)


class Desk:
    """A broker, and two clients who see the same time."""

    def __init__(self, broker: Broker, clock: ManualClock) -> None:
        self.broker, self.clock = broker, clock
        broker.create_topic("orders", queues=3)
        broker.create_group("readers")
        self.one, self.other = self.client("one"), self.client("other")

    def client(self, name: str) -> QueueLocks:
        return QueueLocks(
            self.broker, group="readers", client_id=name, now_s=lambda: self.clock.now_ms() / 1000
        )

    def advance(self, seconds: float) -> None:
        self.clock.advance(int(seconds * 1000))


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    clock = ManualClock()
    with Broker.open(tmp_path / "home", clock=clock, upkeep="none", settings=SMALL) as broker:
        yield Desk(broker, clock)


def test_a_queue_is_locked_by_one_client(desk: Desk) -> None:
    assert desk.one.acquire(QUEUES[:2]) == QUEUES[:2]
    assert desk.other.acquire(QUEUES) == QUEUES[2:]

    assert [desk.one.is_live(queue) for queue in QUEUES] == [True, True, False]
    assert [desk.other.is_live(queue) for queue in QUEUES] == [False, False, True]


def test_a_lock_is_trusted_for_30_s_and_holds_for_60(desk: Desk) -> None:
    desk.one.acquire(QUEUES[:1])

    desk.advance(29.999)
    assert desk.one.is_live(QUEUES[0])
    desk.advance(0.001)
    assert not desk.one.is_live(QUEUES[0])
    assert desk.one.is_locked(QUEUES[0])
    desk.advance(29.999)
    assert desk.other.acquire(QUEUES[:1]) == []
    desk.advance(0.001)
    assert desk.other.acquire(QUEUES[:1]) == QUEUES[:1]


def test_a_renewed_lock_holds_on(desk: Desk) -> None:
    desk.one.acquire(QUEUES)
    for _ in range(6):
        desk.advance(20)
        assert desk.one.renew(QUEUES) == ([], [])
        assert all(map(desk.one.is_live, QUEUES))

    assert desk.other.acquire(QUEUES) == []


def test_a_lock_that_others_have_is_lost(desk: Desk) -> None:
    desk.one.acquire(QUEUES)
    desk.advance(61)
    desk.other.acquire(QUEUES[1:2])

    lost, doubtful = desk.one.renew(QUEUES)

    assert lost == QUEUES[1:2]
    assert doubtful == [QUEUES[0], QUEUES[2]], "others may have had them for a while"
    assert not desk.one.is_locked(QUEUES[1])


def test_a_released_queue_is_for_others_at_once(desk: Desk) -> None:
    desk.one.acquire(QUEUES)

    desk.one.release(QUEUES[0])
    desk.one.release(MessageQueue("orders", "rmq", 9))

    assert desk.other.acquire(QUEUES) == QUEUES[:1]


def test_taking_a_queue_over_ends_what_was_delivered_of_it(desk: Desk) -> None:
    desk.broker.send("orders", bodies(0, 1))
    desk.one.acquire(QUEUES)
    got = desk.broker.receive(
        "orders", "readers", queue_ids=[0, 1, 2], client_id="one", invisible_duration_ms=3_600_000
    )
    assert got.num_rows == 1
    desk.advance(60)
    desk.other.acquire(QUEUES)

    again = desk.broker.receive("orders", "readers", queue_ids=[0, 1, 2], client_id="other")

    assert again["message_id"].to_pylist() == got["message_id"].to_pylist()
    assert again["delivery_attempt"].to_pylist() == [1]
