"""Order by message group: one receiver at a time, in order, without holding up the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow.compute as pc
import pytest

from rmq_pipeline import errors
from tests.behaviour.received import attempts, bodies, by_group

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


def test_a_message_group_comes_in_the_order_it_was_sent(
    door: Door, fifo: str, readers: str, messages: Make
) -> None:
    for start in range(0, 90, 9):
        door.broker.send(fifo, messages(9, start=start, groups=["a", "b", "c"]))

    got = by_group(door.broker.receive(readers, fifo, limit=100))

    for i, name in enumerate("abc"):
        assert got[name] == [(str(n).encode(), 1) for n in range(i, 90, 3)]


def test_a_group_in_flight_is_locked_and_the_others_go_on(
    door: Door, fifo: str, readers: str, messages: Make
) -> None:
    door.broker.send(fifo, messages(9, groups=["a", "b", "c"]))

    got = [by_group(door.broker.receive(readers, fifo, limit=1)) for _ in range(4)]

    assert sorted(name for one in got for name in one) == ["a", "b", "c"]
    assert got[3] == {}


def test_new_messages_of_a_locked_group_wait(
    door: Door, fifo: str, readers: str, messages: Make
) -> None:
    door.broker.send(fifo, messages(1, groups=["a"]))
    first = door.broker.receive(readers, fifo)
    door.broker.send(fifo, messages(2, start=1, groups=["a", "b"]))

    second = by_group(door.broker.receive(readers, fifo))
    door.broker.ack(first)
    third = by_group(door.broker.receive(readers, fifo))

    assert second == {"b": [(b"2", 1)]}
    assert third == {"a": [(b"1", 1)]}


def test_a_group_is_free_when_the_last_of_its_delivery_is_settled(
    door: Door, fifo: str, readers: str, messages: Make
) -> None:
    door.broker.send(fifo, messages(5, groups=["a"]))
    first = door.broker.receive(readers, fifo, limit=3)

    door.broker.ack(first.take([0, 2]))
    locked = door.broker.receive(readers, fifo)
    door.broker.ack(first.take([1]))
    free = door.broker.receive(readers, fifo)

    assert locked.num_rows == 0
    assert bodies(free) == [b"3", b"4"]


def test_two_groups_each_keep_their_own_order(
    door: Door, fifo: str, group: Make, messages: Make
) -> None:
    one, other = group(order="message_group"), group(order="message_group")
    door.broker.send(fifo, messages(4, groups=["a"]))
    door.broker.receive(one, fifo, limit=2)

    got = door.broker.receive(other, fifo, limit=4)

    assert bodies(got) == [b"0", b"1", b"2", b"3"]


def test_a_group_without_order_shares_a_message_group(
    door: Door, fifo: str, group: Make, messages: Make
) -> None:
    readers = group(order="none")
    door.broker.send(fifo, messages(4, groups=["a"]))

    got = [bodies(door.broker.receive(readers, fifo, limit=1)) for _ in range(4)]

    assert got == [[b"0"], [b"1"], [b"2"], [b"3"]]


# ------------------------------------------------------------------------------------- failures


def test_a_failure_releases_the_later_ones_without_counting(
    door: Door, fifo: str, readers: str, messages: Make, fail: Make
) -> None:
    door.broker.send(fifo, messages(5, groups=["a"]))
    got = door.broker.receive(readers, fifo)
    door.broker.ack(got.take([0]))

    fail(readers, got.take([1]))

    with pytest.raises(errors.ReceiptHandleError):
        door.broker.ack(got.take([3]))
    assert door.broker.receive(readers, fifo).num_rows == 0
    door.advance(1_000)
    again = door.broker.receive(readers, fifo)
    assert bodies(again) == [b"1", b"2", b"3", b"4"]
    assert attempts(again) == [2, 1, 1, 1]


def test_a_failure_holds_its_own_group_only(
    door: Door, fifo: str, readers: str, messages: Make, fail: Make
) -> None:
    door.broker.send(fifo, messages(6, groups=["a", "b"]))
    got = door.broker.receive(readers, fifo)
    mine = pc.equal(got["message_group"], "a")

    fail(readers, got.filter(mine).slice(0, 1))
    door.broker.ack(got.filter(pc.invert(mine)))
    door.broker.send(fifo, messages(2, start=6, groups=["a", "b"]))

    assert by_group(door.broker.receive(readers, fifo)) == {"b": [(b"7", 1)]}


def test_acknowledged_messages_stay_acknowledged_after_a_failure_before_them(
    door: Door, fifo: str, readers: str, messages: Make, fail: Make
) -> None:
    door.broker.send(fifo, messages(5, groups=["a"]))
    got = door.broker.receive(readers, fifo)
    door.broker.ack(got.take([1, 3]))

    fail(readers, got.take([0]))
    door.advance(1_000)

    again = door.broker.receive(readers, fifo)
    assert bodies(again) == [b"0", b"2", b"4"]
    assert attempts(again) == [2, 1, 1]


def test_a_failed_message_waits_for_unsettled_ones_before_it(
    door: Door, fifo: str, readers: str, messages: Make, fail: Make
) -> None:
    door.broker.send(fifo, messages(3, groups=["a"]))
    got = door.broker.receive(readers, fifo)

    fail(readers, got.take([1]))
    door.advance(1_000)
    held = door.broker.receive(readers, fifo)
    door.broker.ack(got.take([0]))
    free = door.broker.receive(readers, fifo)

    assert held.num_rows == 0
    assert bodies(free) == [b"1", b"2"]
    assert attempts(free) == [2, 1]


def test_a_failed_message_keeps_its_backoff_when_one_before_it_comes_again(
    door: Door, fifo: str, readers: str, messages: Make, fail: Make
) -> None:
    door.broker.send(fifo, messages(3, groups=["a"]))
    got = door.broker.receive(readers, fifo, invisible_duration_ms=5_000)
    fail(readers, got.take([1]), retry_after_ms=MINUTE)
    door.advance(5_000)

    before = door.broker.receive(readers, fifo)
    door.broker.ack(before)
    held = door.broker.receive(readers, fifo)
    door.advance(MINUTE - 5_000)
    after = door.broker.receive(readers, fifo)

    assert bodies(before) == [b"0"]
    assert held.num_rows == 0
    assert bodies(after) == [b"1", b"2"]
    assert attempts(after) == [2, 1]


@pytest.mark.parametrize("first", ["retry", "dead_letter"])
def test_an_earlier_failure_does_not_shorten_a_later_ones_backoff(
    door: Door, fifo: str, readers: str, messages: Make, outcomes: Make, first: str
) -> None:
    door.broker.send(fifo, messages(3, groups=["a"]))
    got = door.broker.receive(readers, fifo)
    door.broker.settle(readers, outcomes(got.take([1]), "retry", retry_after_ms=MINUTE))
    door.broker.settle(readers, outcomes(got.take([0]), first, retry_after_ms=90))
    door.advance(90)

    before = door.drain(fifo, readers)
    door.advance(MINUTE - 90)
    after = door.broker.receive(readers, fifo)

    assert before == ([b"0"] if first == "retry" else [])
    assert (bodies(after), attempts(after)) == ([b"1", b"2"], [2, 1])


def test_a_dead_letter_does_not_shorten_the_backoff_of_one_that_failed_with_it(
    door: Door, fifo: str, readers: str, messages: Make, outcomes: Make
) -> None:
    door.broker.send(fifo, messages(3, groups=["a"]))
    got = door.broker.receive(readers, fifo)
    said = outcomes(got.slice(0, 2), ["dead_letter", "retry"], retry_after_ms=MINUTE)
    door.broker.settle(readers, said)

    before = door.drain(fifo, readers)
    door.advance(MINUTE)
    after = door.broker.receive(readers, fifo)

    assert before == []
    assert (bodies(after), attempts(after)) == ([b"1", b"2"], [2, 1])


def test_the_end_of_a_message_before_it_does_not_shorten_a_backoff(
    door: Door, fifo: str, group: Make, messages: Make, fail: Make
) -> None:
    readers = group(order="message_group", max_attempts=2)
    door.broker.send(fifo, messages(3, groups=["a"]))
    fail(readers, door.broker.receive(readers, fifo).take([0]), retry_after_ms=0)
    got = door.broker.receive(readers, fifo, invisible_duration_ms=5_000)
    fail(readers, got.take([1]), retry_after_ms=MINUTE)
    door.advance(5_000)

    before = [door.broker.receive(readers, fifo).num_rows for _ in range(3)]
    door.advance(MINUTE - 5_000)
    after = door.broker.receive(readers, fifo)

    assert before == [0, 0, 0]
    assert door.bodies(f"%DLQ%{readers}") == [b"0"]
    assert (bodies(after), attempts(after)) == ([b"1", b"2"], [2, 1])


def test_progress_of_a_message_group_is_a_prefix(
    door: Door, topic: Make, readers: str, messages: Make, fail: Make
) -> None:
    name = topic(type="fifo", queues=1)
    door.broker.send(name, messages(6, groups=["a"]))
    got = door.broker.receive(readers, name)
    door.broker.ack(got.take([0, 1, 4]))
    fail(readers, got.take([2]))

    [row] = door.sql(
        f"SELECT committed_offset, cursor FROM progress WHERE consumer_group = '{readers}'"
        f" AND topic = '{name}'"
    )

    assert row["committed_offset"] == 2


def test_a_failing_message_ends_in_the_dead_letters_and_its_group_goes_on(
    door: Door, fifo: str, group: Make, messages: Make, fail: Make
) -> None:
    readers = group(order="message_group", max_attempts=2, backoff_ms=[0])
    door.broker.send(fifo, messages(3, groups=["a"]))
    for _ in range(2):
        fail(readers, door.broker.receive(readers, fifo, limit=1), retry_after_ms=0)

    rest = door.broker.receive(readers, fifo)

    assert door.bodies(f"%DLQ%{readers}") == [b"0"]
    assert bodies(rest) == [b"1", b"2"]
    assert attempts(rest) == [1, 1]


def test_a_message_of_an_unordered_topic_has_no_group_to_wait_for(
    door: Door, topic: Make, readers: str, messages: Make
) -> None:
    name = topic(queues=1)
    door.broker.send(name, messages(3))

    got = [bodies(door.broker.receive(readers, name, limit=1)) for _ in range(3)]

    assert got == [[b"0"], [b"1"], [b"2"]]


# --------------------------------------------------------------------------------- ended leases
