"""A delivery that is given back comes again at once, as if it had not been."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rmq_pipeline import errors

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make


@pytest.fixture
def door(shared_door: Door) -> Door:
    return shared_door


def test_it_comes_again_at_once_and_was_no_attempt(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group(max_attempts=1)
    door.broker.send(name, messages(3))
    before = door.broker.receive(readers, name)

    door.broker.release(before)

    again = door.broker.receive(readers, name)
    assert again["body"].to_pylist() == before["body"].to_pylist()
    assert again["delivery_attempt"].to_pylist() == [1, 1, 1]
    with pytest.raises(errors.ReceiptHandleError):
        door.broker.ack(before)
    door.broker.ack(again)


def test_all_are_given_back_or_none(door: Door, topic: Make, group: Make, messages: Make) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(3))
    got = door.broker.receive(readers, name)
    door.broker.ack(got.slice(0, 1))

    with pytest.raises(errors.ReceiptHandleError):
        door.broker.release(got)

    assert door.broker.receive(readers, name).num_rows == 0
    door.broker.ack(got.slice(1))


def test_what_lies_behind_in_order_is_given_back_with_it(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="message_group")
    door.broker.send(name, messages(6, groups=["x", "y"]))
    got = door.broker.receive(readers, name)
    second_of_x = got.slice(2, 1)

    door.broker.release(second_of_x)

    of_y = [i for i in range(6) if got["message_group"][i].as_py() == "y"]
    door.broker.ack(got.take([0, *of_y]))
    with pytest.raises(errors.ReceiptHandleError):
        door.broker.ack(got.slice(4, 1))
    again = door.broker.receive(readers, name)
    assert again["body"].to_pylist() == [b"2", b"4"]
    assert again["delivery_attempt"].to_pylist() == [1, 1]


def test_a_failed_attempt_before_it_stays_counted(
    door: Door, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    fail(readers, door.broker.receive(readers, name), retry_after_ms=0)
    door.broker.release(door.broker.receive(readers, name))

    assert door.broker.receive(readers, name)["delivery_attempt"].to_pylist() == [2]


def test_who_waits_for_it_is_woken(door: Door, topic: Make, group: Make, messages: Make) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    got = door.broker.receive(readers, name)
    waiting = door.begin(lambda: door.broker.receive(readers, name, wait_ms=900))

    door.broker.release(got["receipt_handle"].to_pylist())

    assert waiting.result(60)["body"].to_pylist() == [b"0"]
