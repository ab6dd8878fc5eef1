"""Order by message group when a delivery ends: what is released, what is charged, what waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rmq_pipeline import errors
from tests.behaviour.received import attempts, bodies

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make

MINUTE = 60_000


@pytest.fixture
def door(shared_door: Door) -> Door:
    return shared_door


@pytest.fixture
def fifo(topic: Make) -> str:
    return str(topic(type="fifo", queues=2))


@pytest.fixture
def readers(group: Make) -> str:
    return str(group(order="message_group", backoff_ms=[1_000]))


def test_an_ended_delivery_counts_an_attempt_for_its_first_message_only(
    door: Door, fifo: str, readers: str, messages: Make
) -> None:
    door.broker.send(fifo, messages(4, groups=["a"]))
    got = door.broker.receive(readers, fifo, invisible_duration_ms=1_000)
    door.broker.ack(got.take([0]))
    door.advance(1_000)

    again = door.broker.receive(readers, fifo)

    assert bodies(again) == [b"1", b"2", b"3"]
    assert attempts(again) == [2, 1, 1]


def test_a_released_message_is_not_charged_when_it_comes_in_a_later_receive(
    door: Door, fifo: str, readers: str, messages: Make
) -> None:
    door.broker.send(fifo, messages(4, groups=["a"]))
    door.broker.receive(readers, fifo, invisible_duration_ms=1_000)
    door.advance(1_000)
    first = door.broker.receive(readers, fifo, limit=2)
    door.broker.ack(first)

    rest = door.broker.receive(readers, fifo)

    assert (bodies(first), attempts(first)) == ([b"0", b"1"], [2, 1])
    assert (bodies(rest), attempts(rest)) == ([b"2", b"3"], [1, 1])


def test_many_deliveries_that_end_unread_cost_only_the_first_message_its_attempts(
    door: Door, fifo: str, group: Make, messages: Make
) -> None:
    readers = group(order="message_group", max_attempts=3)
    door.broker.send(fifo, messages(3, groups=["a"]))

    for _ in range(3):
        got = door.broker.receive(readers, fifo, invisible_duration_ms=1_000)
        assert bodies(got) == [b"0", b"1", b"2"]
        door.advance(1_000)
    door.broker.receive(readers, fifo)
    door.broker.revive()
    rest = door.broker.receive(readers, fifo)

    assert door.bodies(f"%DLQ%{readers}") == [b"0"]
    assert (bodies(rest), attempts(rest)) in [([b"1", b"2"], [1, 1]), ([], [])]


def test_a_lease_that_ends_inside_a_delivery_releases_the_later_ones(
    door: Door, fifo: str, readers: str, messages: Make
) -> None:
    door.broker.send(fifo, messages(4, groups=["a"]))
    got = door.broker.receive(readers, fifo, invisible_duration_ms=MINUTE)
    door.broker.change_invisible_duration(got.take([1]), 5_000)
    door.advance(5_000)

    locked = door.broker.receive(readers, fifo)
    with pytest.raises(errors.ReceiptHandleError):
        door.broker.ack(got.take([2]))
    door.broker.ack(got.take([0]))
    again = door.broker.receive(readers, fifo)

    assert locked.num_rows == 0
    assert bodies(again) == [b"1", b"2", b"3"]
    assert attempts(again) == [2, 1, 1]


def test_a_longer_lease_of_a_later_message_ends_with_the_earlier_one(
    door: Door, fifo: str, readers: str, messages: Make
) -> None:
    door.broker.send(fifo, messages(3, groups=["a"]))
    got = door.broker.receive(readers, fifo, invisible_duration_ms=5_000)
    longer = door.broker.change_invisible_duration(got.take([2]), MINUTE)
    door.advance(5_000)

    again = door.broker.receive(readers, fifo)

    assert bodies(again) == [b"0", b"1", b"2"]
    assert attempts(again) == [2, 1, 1]
    with pytest.raises(errors.ReceiptHandleError):
        door.broker.ack(longer)


def test_a_group_is_locked_until_the_last_lease_of_its_delivery_has_ended(
    door: Door, fifo: str, readers: str, messages: Make
) -> None:
    door.broker.send(fifo, messages(2, groups=["a"]))
    got = door.broker.receive(readers, fifo, invisible_duration_ms=5_000)
    door.broker.change_invisible_duration(got.take([0]), MINUTE)
    door.advance(5_000)

    locked = door.broker.receive(readers, fifo)
    door.advance(MINUTE - 5_000)
    again = door.broker.receive(readers, fifo)

    assert locked.num_rows == 0
    assert bodies(again) == [b"0", b"1"]
    assert attempts(again)[0] == 2


def test_a_message_without_a_group_is_charged_for_its_own_lease(
    door: Door, topic: Make, readers: str, messages: Make
) -> None:
    name = topic(type="mixed", queues=1)
    door.broker.send(name, messages(4))
    door.broker.receive(readers, name, invisible_duration_ms=1_000)
    door.advance(1_000)

    first = door.broker.receive(readers, name, limit=1)
    rest = door.broker.receive(readers, name)

    assert attempts(first) == [2]
    assert attempts(rest) == [2, 2, 2]
