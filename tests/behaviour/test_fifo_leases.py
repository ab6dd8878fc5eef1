"""Order by message group when a delivery ends: what is released, what is charged, what waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rmq_pipeline import errors
from tests.behaviour.received import attempts, bodies

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

MINUTE = 60_000


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


@pytest.fixture
def fifo(topic: Make) -> str:
    return str(topic(type="fifo", queues=2))


@pytest.fixture
def readers(group: Make) -> str:
    return str(group(order="message_group", backoff_ms=[1_000]))


def test_an_ended_delivery_counts_an_attempt_for_its_first_message_only(
    endpoint: Endpoint, fifo: str, readers: str, messages: Make
) -> None:
    endpoint.broker.send(fifo, messages(4, groups=["a"]))
    got = endpoint.broker.receive(readers, fifo, invisible_duration_ms=1_000)
    endpoint.broker.ack(got.take([0]))
    endpoint.advance(1_000)

    again = endpoint.broker.receive(readers, fifo)

    assert bodies(again) == [b"1", b"2", b"3"]
    assert attempts(again) == [2, 1, 1]


def test_a_released_message_is_not_charged_when_it_comes_in_a_later_receive(
    endpoint: Endpoint, fifo: str, readers: str, messages: Make
) -> None:
    endpoint.broker.send(fifo, messages(4, groups=["a"]))
    endpoint.broker.receive(readers, fifo, invisible_duration_ms=1_000)
    endpoint.advance(1_000)
    first = endpoint.broker.receive(readers, fifo, limit=2)
    endpoint.broker.ack(first)

    rest = endpoint.broker.receive(readers, fifo)

    assert (bodies(first), attempts(first)) == ([b"0", b"1"], [2, 1])
    assert (bodies(rest), attempts(rest)) == ([b"2", b"3"], [1, 1])


def test_many_deliveries_that_end_unread_cost_only_the_first_message_its_attempts(
    endpoint: Endpoint, fifo: str, group: Make, messages: Make
) -> None:
    readers = group(order="message_group", max_attempts=3)
    endpoint.broker.send(fifo, messages(3, groups=["a"]))

    for _ in range(3):
        got = endpoint.broker.receive(readers, fifo, invisible_duration_ms=1_000)
        assert bodies(got) == [b"0", b"1", b"2"]
        endpoint.advance(1_000)
    endpoint.broker.receive(readers, fifo)
    endpoint.broker.revive()
    rest = endpoint.broker.receive(readers, fifo)

    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0"]
    assert (bodies(rest), attempts(rest)) in [([b"1", b"2"], [1, 1]), ([], [])]


def test_a_lease_that_ends_inside_a_delivery_releases_the_later_ones(
    endpoint: Endpoint, fifo: str, readers: str, messages: Make
) -> None:
    endpoint.broker.send(fifo, messages(4, groups=["a"]))
    got = endpoint.broker.receive(readers, fifo, invisible_duration_ms=MINUTE)
    endpoint.broker.change_invisible_duration(got.take([1]), 5_000)
    endpoint.advance(5_000)

    locked = endpoint.broker.receive(readers, fifo)
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(got.take([2]))
    endpoint.broker.ack(got.take([0]))
    again = endpoint.broker.receive(readers, fifo)

    assert locked.num_rows == 0
    assert bodies(again) == [b"1", b"2", b"3"]
    assert attempts(again) == [2, 1, 1]


def test_a_longer_lease_of_a_later_message_ends_with_the_earlier_one(
    endpoint: Endpoint, fifo: str, readers: str, messages: Make
) -> None:
    endpoint.broker.send(fifo, messages(3, groups=["a"]))
    got = endpoint.broker.receive(readers, fifo, invisible_duration_ms=5_000)
    longer = endpoint.broker.change_invisible_duration(got.take([2]), MINUTE)
    endpoint.advance(5_000)

    again = endpoint.broker.receive(readers, fifo)

    assert bodies(again) == [b"0", b"1", b"2"]
    assert attempts(again) == [2, 1, 1]
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(longer)


def test_a_group_is_locked_until_the_last_lease_of_its_delivery_has_ended(
    endpoint: Endpoint, fifo: str, readers: str, messages: Make
) -> None:
    endpoint.broker.send(fifo, messages(2, groups=["a"]))
    got = endpoint.broker.receive(readers, fifo, invisible_duration_ms=5_000)
    endpoint.broker.change_invisible_duration(got.take([0]), MINUTE)
    endpoint.advance(5_000)

    locked = endpoint.broker.receive(readers, fifo)
    endpoint.advance(MINUTE - 5_000)
    again = endpoint.broker.receive(readers, fifo)

    assert locked.num_rows == 0
    assert bodies(again) == [b"0", b"1"]
    assert attempts(again)[0] == 2


def test_a_message_without_a_group_is_charged_for_its_own_lease(
    endpoint: Endpoint, topic: Make, readers: str, messages: Make
) -> None:
    name = topic(type="mixed", queues=1)
    endpoint.broker.send(name, messages(4))
    endpoint.broker.receive(readers, name, invisible_duration_ms=1_000)
    endpoint.advance(1_000)

    first = endpoint.broker.receive(readers, name, limit=1)
    rest = endpoint.broker.receive(readers, name)

    assert attempts(first) == [2]
    assert attempts(rest) == [2, 2, 2]
