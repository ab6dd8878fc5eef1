"""A delivery that is given back comes again at once, as if it had not been."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rmq_pipeline import errors

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


def test_it_comes_again_at_once_and_was_no_attempt(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(max_attempts=1)
    endpoint.broker.send(name, messages(3))
    before = endpoint.broker.receive(readers, name)

    endpoint.broker.release(before)

    again = endpoint.broker.receive(readers, name)
    assert again["body"].to_pylist() == before["body"].to_pylist()
    assert again["delivery_attempt"].to_pylist() == [1, 1, 1]
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(before)
    endpoint.broker.ack(again)


def test_all_are_released_or_none(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(3))
    got = endpoint.broker.receive(readers, name)
    endpoint.broker.ack(got.slice(0, 1))

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.release(got)

    assert endpoint.broker.receive(readers, name).num_rows == 0
    endpoint.broker.ack(got.slice(1))


def test_what_lies_behind_in_order_is_released_with_it(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="message_group")
    endpoint.broker.send(name, messages(6, groups=["x", "y"]))
    got = endpoint.broker.receive(readers, name)
    second_of_x = got.slice(2, 1)

    endpoint.broker.release(second_of_x)

    of_y = [i for i in range(6) if got["message_group"][i].as_py() == "y"]
    endpoint.broker.ack(got.take([0, *of_y]))
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(got.slice(4, 1))
    again = endpoint.broker.receive(readers, name)
    assert again["body"].to_pylist() == [b"2", b"4"]
    assert again["delivery_attempt"].to_pylist() == [1, 1]


def test_a_failed_attempt_before_it_stays_counted(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    fail(readers, endpoint.broker.receive(readers, name), retry_after_ms=0)
    endpoint.broker.release(endpoint.broker.receive(readers, name))

    assert endpoint.broker.receive(readers, name)["delivery_attempt"].to_pylist() == [2]


def test_who_waits_for_it_is_woken(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    got = endpoint.broker.receive(readers, name)
    waiting = endpoint.begin(lambda: endpoint.broker.receive(readers, name, wait_ms=900))

    endpoint.broker.release(got["receipt_handle"].to_pylist())

    assert waiting.result(60)["body"].to_pylist() == [b"0"]
