"""A lock is trusted for half of the time that it holds at the broker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.consumer.message_queue import MessageQueue, queues_of
from rmq_pipeline.consumer.rebalancing import QueueLocks, Renewed
from rmq_pipeline.errors import BusyError, ForbiddenError, RocketMQError
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
        assert desk.one.renew(QUEUES) == Renewed()
        assert all(map(desk.one.is_live, QUEUES))

    assert desk.other.acquire(QUEUES) == []


def test_a_lock_that_others_have_is_lost(desk: Desk) -> None:
    desk.one.acquire(QUEUES)
    desk.advance(61)
    desk.other.acquire(QUEUES[1:2])

    renewed = desk.one.renew(QUEUES)

    assert renewed.lost == QUEUES[1:2]
    assert renewed.doubtful == [QUEUES[0], QUEUES[2]], "others may have had them for a while"
    assert not desk.one.is_locked(QUEUES[1])
    assert [desk.one.is_live(queue) for queue in QUEUES] == [False, False, False]
    for queue in QUEUES:  # as if what was held of them had been dropped
        desk.one.trust(queue)
    assert [desk.one.is_live(queue) for queue in QUEUES] == [True, False, True]


def test_a_renewal_that_reached_the_broker_late_leaves_doubts(desk: Desk) -> None:
    slow = Slow(desk)
    late = QueueLocks(
        cast(Any, slow), group="readers", client_id="late", now_s=lambda: desk.clock.now_ms() / 1000
    )
    late.acquire(QUEUES)
    desk.advance(45)
    slow.takes_s = 20

    assert late.renew(QUEUES) == Renewed(doubtful=QUEUES)


@pytest.mark.parametrize(
    ("refusal", "renewed"), [(ForbiddenError("no"), "ac"), (BusyError("away"), "a")]
)
def test_a_topic_that_is_refused_keeps_no_other_from_being_renewed(
    desk: Desk, refusal: RocketMQError, renewed: str
) -> None:
    for topic in "abc":
        desk.broker.create_topic(topic, queues=1)
    slow = Slow(desk)
    locks = QueueLocks(
        cast(Any, slow), group="readers", client_id="one", now_s=lambda: desk.clock.now_ms() / 1000
    )
    queues = [MessageQueue(topic, "rmq", 0) for topic in "abc"]
    for queue in queues:
        locks.acquire([queue])
    slow.refusals["b"] = refusal
    desk.advance(20)

    assert locks.renew(queues) == Renewed(refusal=refusal)

    desk.advance(10)
    assert "".join(queue.topic for queue in queues if locks.is_live(queue)) == renewed


def test_what_was_lost_is_told_although_another_topic_is_refused(desk: Desk) -> None:
    slow = Slow(desk)
    locks = QueueLocks(cast(Any, slow), group="readers", client_id="one")
    desk.broker.create_topic("parcels", queues=1)
    parcel = MessageQueue("parcels", "rmq", 0)
    locks.acquire([parcel])
    desk.other.acquire(QUEUES)
    slow.refusals["parcels"] = BusyError("away")

    assert locks.renew([QUEUES[0], parcel]).lost == QUEUES[:1]


class Slow:
    """A broker that takes its time to lock queues, and refuses some topics."""

    def __init__(self, desk: Desk) -> None:
        self.takes_s = 0
        self.refusals: dict[str, RocketMQError] = {}
        self._desk = desk

    def lock_queues(self, group: str, topic: str, **how: Any) -> list[int]:
        if topic in self.refusals:
            raise self.refusals[topic]
        self._desk.advance(self.takes_s)
        return self._desk.broker.lock_queues(group, topic, **how)


def test_a_released_queue_is_for_others_at_once(desk: Desk) -> None:
    desk.one.acquire(QUEUES)

    desk.one.release(QUEUES[0])
    desk.one.release(MessageQueue("orders", "rmq", 9))

    assert desk.other.acquire(QUEUES) == QUEUES[:1]


def test_taking_a_queue_over_ends_what_was_delivered_of_it(desk: Desk) -> None:
    desk.broker.send("orders", bodies(0, 1))
    desk.one.acquire(QUEUES)
    got = desk.broker.receive(
        "readers", "orders", queue_ids=[0, 1, 2], client_id="one", invisible_duration_ms=3_600_000
    )
    assert got.num_rows == 1
    desk.advance(60)
    desk.other.acquire(QUEUES)

    again = desk.broker.receive("readers", "orders", queue_ids=[0, 1, 2], client_id="other")

    assert again["message_id"].to_pylist() == got["message_id"].to_pylist()
    assert again["delivery_attempt"].to_pylist() == [1]
