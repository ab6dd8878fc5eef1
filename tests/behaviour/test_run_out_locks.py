"""A lock that has run out gives back what was leased under it, whether or not anybody locks again.

The broker looks for such locks when it keeps house.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors
from tests.behaviour.reopening import reopened_from_the_log

if TYPE_CHECKING:
    import pyarrow as pa

    from tests.behaviour.conftest import Door, Make

LOCK_MS = 60_000
#: The leases of those who have locks are as long as may be.
LEASE_MS = 43_200_000


@pytest.fixture
def name(door: Door, topic: Make, messages: Make) -> str:
    """Two queues with five messages each."""
    made = str(topic(queues=2))
    door.broker.send(made, messages(10))
    return made


@pytest.fixture
def readers(group: Make) -> str:
    return str(group())


def lock(door: Door, readers: str, name: str, *queues: int, by: str, **how: Any) -> list[int]:
    return door.broker.lock_queues(readers, name, queue_ids=queues, client_id=by, **how)


def receive(door: Door, name: str, readers: str, *, by: str = "", **how: Any) -> pa.Table:
    return door.broker.receive(
        name, readers, client_id=by, limit=100, invisible_duration_ms=LEASE_MS, **how
    )


def keep_house(door: Door) -> None:
    """What the broker does now and then."""
    door.inside.engine.members.let_go(door.inside.engine.submit)


def test_what_was_leased_under_a_lock_is_for_others_once_it_has_run_out(
    door: Door, name: str, readers: str
) -> None:
    lock(door, readers, name, 0, by="a")
    before = receive(door, name, readers, by="a", queue_ids=[0])
    door.advance(LOCK_MS - 1)
    keep_house(door)
    assert receive(door, name, readers, queue_ids=[1]).num_rows == 5

    door.advance(1)
    keep_house(door)

    again = receive(door, name, readers)
    assert again["body"].to_pylist() == before["body"].to_pylist()
    assert set(again["delivery_attempt"].to_pylist()) == {1}
    with pytest.raises(errors.ReceiptHandleError):
        door.broker.ack(before)
    assert door.sql(f"FROM queue_locks WHERE consumer_group = '{readers}'") == []


def test_a_receive_that_waits_gets_what_a_lock_leaves_when_it_has_run_out(
    door: Door, name: str, readers: str
) -> None:
    lock(door, readers, name, 0, 1, by="a", duration_ms=500)
    receive(door, name, readers, by="a")
    waiting = door.begin(lambda: receive(door, name, readers, wait_ms=900))

    door.advance(500)

    # No word of the test's: the broker keeps house.
    assert waiting.result(30).num_rows == 10


def test_a_lock_that_was_renewed_keeps_its_leases(door: Door, name: str, readers: str) -> None:
    lock(door, readers, name, 0, by="a")
    got = receive(door, name, readers, by="a", queue_ids=[0])
    door.advance(LOCK_MS - 1)
    lock(door, readers, name, 0, by="a")

    door.advance(LOCK_MS - 1)
    keep_house(door)

    door.broker.ack(got)


def test_a_lock_that_has_run_out_ends_leases_once(door: Door, name: str, readers: str) -> None:
    lock(door, readers, name, 0, by="a")
    receive(door, name, readers, by="a", queue_ids=[0])
    door.advance(LOCK_MS)
    keep_house(door)
    others = receive(door, name, readers, by="b")

    door.advance(LOCK_MS)
    keep_house(door)

    assert others.num_rows == 10
    door.broker.ack(others)


def test_leases_of_queues_that_nobody_has_locked_go_on(
    door: Door, name: str, readers: str, group: Make
) -> None:
    lock(door, readers, name, 0, by="a")
    unlocked = receive(door, name, readers, by="b", queue_ids=[1])
    of_another_group = receive(door, name, group(), by="a")

    door.advance(LOCK_MS)
    keep_house(door)

    door.broker.ack(unlocked)
    door.broker.ack(of_another_group)


@pytest.mark.parametrize("from_the_log", [False, True])
def test_a_lock_that_ran_out_while_the_broker_was_away_leaves_nothing(
    door: Door, name: str, readers: str, from_the_log: bool
) -> None:
    lock(door, readers, name, 0, by="a")
    receive(door, name, readers, by="a", queue_ids=[0])
    door.sql("FROM queue_locks")  # dispatched
    door.advance(LOCK_MS)

    if from_the_log:
        reopened_from_the_log(door)
    else:
        door.reopen()
    keep_house(door)

    assert receive(door, name, readers, queue_ids=[0]).num_rows == 5
