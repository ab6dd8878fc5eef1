"""Members share queues: each has one owner, and gets what others leave."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.allocation import MachineRoomNearby, average_by_circle
from rmq_pipeline.consumer.message_queue import MessageQueue, queues_of
from rmq_pipeline.consumer.rebalancing import Rebalancer
from rmq_pipeline.errors import (
    AllocationError,
    BrokerUnavailableError,
    ConsumerGroupNotFoundError,
    TopicNotFoundError,
)
from tests.consumer.conftest import FAST, SMALL, Make
from tests.consumer.pieces import Gate, repeat
from tests.waiting import until

#: Of an owner that drops nothing: it is not waited for.
IMPATIENT: Final = replace(FAST, let_go_s=1.0)


class Owner:
    """Takes what it is given, and drops it when it is told to be done."""

    def __init__(self, ledger: "Ledger", name: str) -> None:
        self.name, self.ledger = name, ledger
        self.owned: set[MessageQueue] = set()
        self.resets: list[MessageQueue] = []
        self.is_busy = False
        self.refuses = 0

    def take(self, queue: MessageQueue) -> None:
        if self.refuses:
            self.refuses -= 1
            raise BrokerUnavailableError("The offset cannot be read.")
        self.owned.add(queue)
        self.ledger.took(queue, self.name)

    def drop(self, queue: MessageQueue) -> bool:
        if self.is_busy:
            return False
        self.owned.discard(queue)
        self.ledger.dropped(queue, self.name)
        return True

    def reset(self, queue: MessageQueue) -> None:
        self.resets.append(queue)

    def report(self) -> dict[str, Any]:
        return {"model": "clustering", "order": "queue"}


class Ledger:
    """Who has which queue, and whether two ever had the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.owners: dict[MessageQueue, str] = {}
        self.collisions: list[str] = []

    def took(self, queue: MessageQueue, name: str) -> None:
        with self._lock:
            if self.owners.get(queue, name) != name:
                self.collisions.append(f"{queue} of {self.owners[queue]} taken by {name}")
            self.owners[queue] = name

    def dropped(self, queue: MessageQueue, name: str) -> None:
        with self._lock:
            if self.owners.get(queue) == name:
                del self.owners[queue]


class Members:
    """Members of one group, each with its owner."""

    def __init__(self, verbs: Broker, group: str, topic: str) -> None:
        self.verbs, self.group, self.topic = verbs, group, topic
        self.ledger = Ledger()
        self.open: list[Rebalancer] = []

    def join(self, name: str, **settings: Any) -> tuple[Rebalancer, Owner]:
        owner = Owner(self.ledger, name)
        rebalancer = self.prepare(owner, name, **settings)
        rebalancer.start()
        self.open.append(rebalancer)
        return rebalancer, owner

    def prepare(self, owner: Owner, name: str, **settings: Any) -> Rebalancer:
        chosen = {"locking": True, "pace": FAST, "topics": [self.topic], **settings}
        return Rebalancer(self.verbs, group=self.group, client_id=name, owner=owner, **chosen)

    def close(self) -> None:
        for rebalancer in self.open:
            rebalancer.close()


@pytest.fixture
def members(verbs: Broker, topic: Make, group: Make) -> Iterator[Members]:
    members = Members(verbs, group(), topic(queues=4))
    yield members
    members.close()
    assert members.ledger.collisions == []


def ids(owner: Owner) -> list[int]:
    # A copy: threads of the owner change it meanwhile.
    return sorted(queue.queue_id for queue in owner.owned.copy())


def test_one_member_owns_all_queues(members: Members) -> None:
    rebalancer, owner = members.join("a")

    until(lambda: ids(owner) == [0, 1, 2, 3])

    assert all(map(rebalancer.holds, rebalancer.owned()))
    assert rebalancer.owned() == queues_of(members.topic, 4)


def test_queues_are_shared_and_taken_back(members: Members) -> None:
    _, first = members.join("a")
    until(lambda: len(first.owned) == 4)

    second, other = members.join("b")
    until(lambda: (ids(first), ids(other)) == ([0, 1], [2, 3]))

    second.close()
    until(lambda: ids(first) == [0, 1, 2, 3])


def test_a_strategy_shares(members: Members) -> None:
    _, first = members.join("a", strategy=average_by_circle)
    _, second = members.join("b", strategy=average_by_circle)

    until(lambda: (ids(first), ids(second)) == ([0, 2], [1, 3]))


def test_a_queue_is_handed_over_only_once_its_owner_has_dropped_it(members: Members) -> None:
    leaving, first = members.join("a")
    until(lambda: len(first.owned) == 4)
    first.is_busy = True
    _, second = members.join("b")
    until(lambda: leaving.owned() != queues_of(members.topic, 4))

    assert second.owned == set()
    assert leaving.holds(queues_of(members.topic, 4)[3]), "what runs of it may end"
    first.is_busy = False

    until(lambda: ids(second) == [2, 3])


def test_an_owner_that_drops_nothing_loses_its_queues_in_the_end(members: Members) -> None:
    leaving, first = members.join("a", pace=IMPATIENT)
    until(lambda: len(first.owned) == 4)
    first.is_busy = True
    members.ledger.owners.clear()

    _, second = members.join("b")

    until(lambda: ids(second) == [2, 3])
    assert not leaving.holds(queues_of(members.topic, 4)[3])


def test_without_locks_a_queue_is_taken_at_once(members: Members) -> None:
    _, first = members.join("a", locking=False, pace=IMPATIENT)
    until(lambda: len(first.owned) == 4)
    first.is_busy = True
    members.ledger.owners.clear()

    _, second = members.join("b", locking=False)

    until(lambda: ids(second) == [2, 3])


def test_a_member_that_has_only_stopped_beating_keeps_its_locks(members: Members) -> None:
    members.verbs.lock_queues(members.group, members.topic, queue_ids=[1], client_id="elsewhere")

    _, owner = members.join("a")

    until(lambda: ids(owner) == [0, 2, 3])
    members.verbs.unlock_queues(members.group, members.topic, queue_ids=[1], client_id="elsewhere")
    until(lambda: ids(owner) == [0, 1, 2, 3])


def test_a_queue_whose_lock_is_lost_is_dropped_and_taken_again(members: Members) -> None:
    rebalancer, owner = members.join("a")
    until(lambda: len(owner.owned) == 4)
    where = members.group, members.topic
    queue = queues_of(members.topic, 4)[2]

    # Its owner may renew the lock between the two.
    repeat(
        lambda: members.verbs.unlock_queues(*where, queue_ids=[2], client_id="a"),
        lambda: members.verbs.lock_queues(*where, queue_ids=[2], client_id="elsewhere") == [2],
    )

    until(lambda: ids(owner) == [0, 1, 3])
    assert not rebalancer.holds(queue)
    members.verbs.unlock_queues(*where, queue_ids=[2], client_id="elsewhere")
    until(lambda: ids(owner) == [0, 1, 2, 3] and rebalancer.holds(queue))


def test_an_offset_that_cannot_be_read_is_tried_again(members: Members) -> None:
    owner = Owner(members.ledger, "a")
    owner.refuses = 3
    rebalancer = members.prepare(owner, "a")
    members.open.append(rebalancer)

    rebalancer.start()

    until(lambda: ids(owner) == [0, 1, 2, 3])
    assert owner.refuses == 0


def test_new_queues_are_taken(members: Members) -> None:
    _, owner = members.join("a")
    until(lambda: len(owner.owned) == 4)

    members.verbs.alter_topic(members.topic, queues=6)

    until(lambda: ids(owner) == [0, 1, 2, 3, 4, 5])


def test_queues_of_a_topic_that_is_gone_are_dropped(members: Members) -> None:
    rebalancer, owner = members.join("a")
    until(lambda: len(owner.owned) == 4)

    members.verbs.delete_topic(members.topic, force=True)

    until(lambda: not owner.owned and isinstance(rebalancer.trouble, TopicNotFoundError))


def test_only_members_that_subscribed_to_a_topic_share_it(members: Members, topic: Make) -> None:
    other = topic(queues=2)
    _, first = members.join("a")
    _, second = members.join("b", topics=[members.topic, other])

    until(lambda: len(first.owned) == 2 and len(second.owned) == 4)
    assert {queue.topic for queue in first.owned.copy()} == {members.topic}


def test_topics_come_and_go(members: Members, topic: Make) -> None:
    other = topic(queues=2)
    rebalancer, owner = members.join("a")

    rebalancer.subscribe(other)
    until(lambda: len(owner.owned) == 6)
    rebalancer.unsubscribe(members.topic)

    until(lambda: {queue.topic for queue in owner.owned.copy()} == {other})


def test_broadcasting_members_own_all_queues(members: Members) -> None:
    rebalancer, first = members.join("a", model="broadcasting")
    _, second = members.join("b", model="broadcasting")

    until(lambda: ids(first) == [0, 1, 2, 3] == ids(second))
    assert all(map(rebalancer.holds, rebalancer.owned()))
    members.ledger.collisions.clear()


def test_a_reset_is_passed_on_to_the_owner(members: Members) -> None:
    _, owner = members.join("a")
    until(lambda: len(owner.owned) == 4)

    members.verbs.reset_offset(members.group, members.topic, to_earliest=True, queue_id=1)

    until(lambda: owner.resets == [queues_of(members.topic, 4)[1]])


def test_a_listener_hears_of_every_share(members: Members) -> None:
    heard: list[tuple[int, list[int]]] = []

    def listener(topic: str, queues: list[MessageQueue], own: list[MessageQueue]) -> None:
        assert topic == members.topic
        heard.append((len(queues), [queue.queue_id for queue in own]))

    members.join("a", listener=listener)
    until(lambda: heard == [(4, [0, 1, 2, 3])])
    members.join("b")

    until(lambda: heard[-1] == (4, [0, 1]))


def test_a_room_that_is_not_known_is_trouble(members: Members) -> None:
    rebalancer, owner = members.join("a", strategy=MachineRoomNearby())

    until(lambda: isinstance(rebalancer.trouble, AllocationError))
    assert not owner.owned


def test_no_group_and_no_topic_are_refused_at_once(verbs: Broker, group: Make, topic: Make) -> None:
    with pytest.raises(ConsumerGroupNotFoundError):
        Members(verbs, "nobody", topic()).join("a")
    with pytest.raises(TopicNotFoundError):
        Members(verbs, group(), "nothing").join("a")


def test_who_closes_leaves_the_group_and_its_locks(members: Members) -> None:
    rebalancer, owner = members.join("a")
    until(lambda: len(owner.owned) == 4)

    rebalancer.close()

    assert not owner.owned
    assert "a" not in members.verbs.describe_group(members.group)["members"]
    got = members.verbs.lock_queues(
        members.group, members.topic, queue_ids=[0, 1, 2, 3], client_id="b"
    )
    assert got == [0, 1, 2, 3]


def test_who_closes_while_it_takes_queues_does_not_wait(members: Members) -> None:
    gate = Gate()

    class Slow(Owner):
        def take(self, queue: MessageQueue) -> None:
            gate.pass_through()
            super().take(queue)

    owner = Slow(members.ledger, "a")
    rebalancer = members.prepare(owner, "a")
    rebalancer.start()
    assert gate.arrived.wait(30)
    closing = threading.Thread(target=rebalancer.close, kwargs={"patience_s": 3600.0}, daemon=True)
    closing.start()
    until(lambda: rebalancer._close_by is not None)
    gate.open()
    closing.join(30)

    assert not closing.is_alive()
    assert members.verbs.describe_group(members.group)["locks"] == []


def test_an_owner_that_fails_with_its_report_stays_a_member(members: Members) -> None:
    rebalancer, owner = members.join("a")
    until(lambda: len(owner.owned) == 4)
    failed = threading.Event()

    def report() -> dict[str, Any]:
        failed.set()
        raise ZeroDivisionError

    rebalancer._membership._details = report
    members.verbs.reset_offset(members.group, members.topic, to_earliest=True, queue_id=0)
    assert failed.wait(30)
    rebalancer._membership._details = owner.report

    members.verbs.alter_topic(members.topic, queues=5)
    until(lambda: ids(owner) == [0, 1, 2, 3, 4] and rebalancer.holds(rebalancer.owned()[4]))


@pytest.mark.slow
@pytest.mark.long
def test_locks_are_renewed_after_a_second_and_then_every_20(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "home", upkeep="none", settings=SMALL) as broker:
        broker.create_topic("orders", queues=2)
        broker.create_group("desks")
        asked: list[float] = []
        held: list[bool] = []

        class Noted:
            def __getattr__(self, name: str) -> Any:
                if name == "lock_queues":
                    asked.append(time.monotonic())
                return getattr(broker, name)

        owner = Owner(Ledger(), "a")
        rebalancer = Rebalancer(
            Noted(),
            group="desks",
            client_id="a",
            topics=["orders"],
            owner=owner,
            locking=True,
        )
        rebalancer.start()
        until(lambda: len(owner.owned) == 2)

        def look() -> bool:
            held.append(all(map(rebalancer.holds, queues_of("orders", 2))))
            assert broker.lock_queues("desks", "orders", queue_ids=[0, 1], client_id="b") == []
            return len(asked) >= 4

        until(look, within_s=90)
        rebalancer.close()

    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert 0.9 <= gaps[0] < 10
    assert all(19.5 <= gap < 29 for gap in gaps[1:]), gaps
    assert all(held)
