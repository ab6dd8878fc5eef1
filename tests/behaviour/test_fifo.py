"""Order by message group: one receiver at a time, in order, without holding up the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow.compute as pc
import pytest

from rmq_pipeline import errors
from tests.behaviour.received import attempts, bodies, by_group

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


def test_a_message_group_comes_in_the_order_it_was_sent(
    endpoint: Endpoint, fifo: str, readers: str, messages: Make
) -> None:
    for start in range(0, 90, 9):
        endpoint.broker.send(fifo, messages(9, start=start, groups=["a", "b", "c"]))

    got = by_group(endpoint.broker.receive(readers, fifo, limit=100))

    for i, name in enumerate("abc"):
        assert got[name] == [(str(n).encode(), 1) for n in range(i, 90, 3)]


def test_a_group_in_flight_is_locked_and_the_others_go_on(
    endpoint: Endpoint, fifo: str, readers: str, messages: Make
) -> None:
    endpoint.broker.send(fifo, messages(9, groups=["a", "b", "c"]))

    got = [by_group(endpoint.broker.receive(readers, fifo, limit=1)) for _ in range(4)]

    assert sorted(name for one in got for name in one) == ["a", "b", "c"]
    assert got[3] == {}


def test_new_messages_of_a_locked_group_wait(
    endpoint: Endpoint, fifo: str, readers: str, messages: Make
) -> None:
    endpoint.broker.send(fifo, messages(1, groups=["a"]))
    first = endpoint.broker.receive(readers, fifo)
    endpoint.broker.send(fifo, messages(2, start=1, groups=["a", "b"]))

    second = by_group(endpoint.broker.receive(readers, fifo))
    endpoint.broker.ack(first)
    third = by_group(endpoint.broker.receive(readers, fifo))

    assert second == {"b": [(b"2", 1)]}
    assert third == {"a": [(b"1", 1)]}


def test_a_group_is_free_when_the_last_of_its_delivery_is_settled(
    endpoint: Endpoint, fifo: str, readers: str, messages: Make
) -> None:
    endpoint.broker.send(fifo, messages(5, groups=["a"]))
    first = endpoint.broker.receive(readers, fifo, limit=3)

    endpoint.broker.ack(first.take([0, 2]))
    locked = endpoint.broker.receive(readers, fifo)
    endpoint.broker.ack(first.take([1]))
    free = endpoint.broker.receive(readers, fifo)

    assert locked.num_rows == 0
    assert bodies(free) == [b"3", b"4"]


def test_two_groups_each_keep_their_own_order(
    endpoint: Endpoint, fifo: str, group: Make, messages: Make
) -> None:
    one, other = group(order="message_group"), group(order="message_group")
    endpoint.broker.send(fifo, messages(4, groups=["a"]))
    endpoint.broker.receive(one, fifo, limit=2)

    got = endpoint.broker.receive(other, fifo, limit=4)

    assert bodies(got) == [b"0", b"1", b"2", b"3"]


def test_a_group_without_order_shares_a_message_group(
    endpoint: Endpoint, fifo: str, group: Make, messages: Make
) -> None:
    readers = group(order="none")
    endpoint.broker.send(fifo, messages(4, groups=["a"]))

    got = [bodies(endpoint.broker.receive(readers, fifo, limit=1)) for _ in range(4)]

    assert got == [[b"0"], [b"1"], [b"2"], [b"3"]]


# ------------------------------------------------------------------------------------- failures


def test_a_failure_releases_the_later_ones_without_counting(
    endpoint: Endpoint, fifo: str, readers: str, messages: Make, fail: Make
) -> None:
    endpoint.broker.send(fifo, messages(5, groups=["a"]))
    got = endpoint.broker.receive(readers, fifo)
    endpoint.broker.ack(got.take([0]))

    fail(readers, got.take([1]))

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(got.take([3]))
    assert endpoint.broker.receive(readers, fifo).num_rows == 0
    endpoint.advance(1_000)
    again = endpoint.broker.receive(readers, fifo)
    assert bodies(again) == [b"1", b"2", b"3", b"4"]
    assert attempts(again) == [2, 1, 1, 1]


def test_a_failure_holds_its_own_group_only(
    endpoint: Endpoint, fifo: str, readers: str, messages: Make, fail: Make
) -> None:
    endpoint.broker.send(fifo, messages(6, groups=["a", "b"]))
    got = endpoint.broker.receive(readers, fifo)
    mine = pc.equal(got["message_group"], "a")

    fail(readers, got.filter(mine).slice(0, 1))
    endpoint.broker.ack(got.filter(pc.invert(mine)))
    endpoint.broker.send(fifo, messages(2, start=6, groups=["a", "b"]))

    assert by_group(endpoint.broker.receive(readers, fifo)) == {"b": [(b"7", 1)]}


def test_acknowledged_messages_stay_acknowledged_after_a_failure_before_them(
    endpoint: Endpoint, fifo: str, readers: str, messages: Make, fail: Make
) -> None:
    endpoint.broker.send(fifo, messages(5, groups=["a"]))
    got = endpoint.broker.receive(readers, fifo)
    endpoint.broker.ack(got.take([1, 3]))

    fail(readers, got.take([0]))
    endpoint.advance(1_000)

    again = endpoint.broker.receive(readers, fifo)
    assert bodies(again) == [b"0", b"2", b"4"]
    assert attempts(again) == [2, 1, 1]


def test_a_failed_message_waits_for_unsettled_ones_before_it(
    endpoint: Endpoint, fifo: str, readers: str, messages: Make, fail: Make
) -> None:
    endpoint.broker.send(fifo, messages(3, groups=["a"]))
    got = endpoint.broker.receive(readers, fifo)

    fail(readers, got.take([1]))
    endpoint.advance(1_000)
    held = endpoint.broker.receive(readers, fifo)
    endpoint.broker.ack(got.take([0]))
    free = endpoint.broker.receive(readers, fifo)

    assert held.num_rows == 0
    assert bodies(free) == [b"1", b"2"]
    assert attempts(free) == [2, 1]


def test_a_failed_message_keeps_its_backoff_when_one_before_it_comes_again(
    endpoint: Endpoint, fifo: str, readers: str, messages: Make, fail: Make
) -> None:
    endpoint.broker.send(fifo, messages(3, groups=["a"]))
    got = endpoint.broker.receive(readers, fifo, invisible_duration_ms=5_000)
    fail(readers, got.take([1]), retry_after_ms=MINUTE)
    endpoint.advance(5_000)

    before = endpoint.broker.receive(readers, fifo)
    endpoint.broker.ack(before)
    held = endpoint.broker.receive(readers, fifo)
    endpoint.advance(MINUTE - 5_000)
    after = endpoint.broker.receive(readers, fifo)

    assert bodies(before) == [b"0"]
    assert held.num_rows == 0
    assert bodies(after) == [b"1", b"2"]
    assert attempts(after) == [2, 1]


@pytest.mark.parametrize("first", ["retry", "dead_letter"])
def test_an_earlier_failure_does_not_shorten_a_later_ones_backoff(
    endpoint: Endpoint, fifo: str, readers: str, messages: Make, outcomes: Make, first: str
) -> None:
    endpoint.broker.send(fifo, messages(3, groups=["a"]))
    got = endpoint.broker.receive(readers, fifo)
    endpoint.broker.settle(readers, outcomes(got.take([1]), "retry", retry_after_ms=MINUTE))
    endpoint.broker.settle(readers, outcomes(got.take([0]), first, retry_after_ms=90))
    endpoint.advance(90)

    before = endpoint.drain(fifo, readers)
    endpoint.advance(MINUTE - 90)
    after = endpoint.broker.receive(readers, fifo)

    assert before == ([b"0"] if first == "retry" else [])
    assert (bodies(after), attempts(after)) == ([b"1", b"2"], [2, 1])


def test_a_dead_letter_does_not_shorten_the_backoff_of_one_that_failed_with_it(
    endpoint: Endpoint, fifo: str, readers: str, messages: Make, outcomes: Make
) -> None:
    endpoint.broker.send(fifo, messages(3, groups=["a"]))
    got = endpoint.broker.receive(readers, fifo)
    said = outcomes(got.slice(0, 2), ["dead_letter", "retry"], retry_after_ms=MINUTE)
    endpoint.broker.settle(readers, said)

    before = endpoint.drain(fifo, readers)
    endpoint.advance(MINUTE)
    after = endpoint.broker.receive(readers, fifo)

    assert before == []
    assert (bodies(after), attempts(after)) == ([b"1", b"2"], [2, 1])


def test_the_end_of_a_message_before_it_does_not_shorten_a_backoff(
    endpoint: Endpoint, fifo: str, group: Make, messages: Make, fail: Make
) -> None:
    readers = group(order="message_group", max_attempts=2)
    endpoint.broker.send(fifo, messages(3, groups=["a"]))
    fail(readers, endpoint.broker.receive(readers, fifo).take([0]), retry_after_ms=0)
    got = endpoint.broker.receive(readers, fifo, invisible_duration_ms=5_000)
    fail(readers, got.take([1]), retry_after_ms=MINUTE)
    endpoint.advance(5_000)

    before = [endpoint.broker.receive(readers, fifo).num_rows for _ in range(3)]
    endpoint.advance(MINUTE - 5_000)
    after = endpoint.broker.receive(readers, fifo)

    assert before == [0, 0, 0]
    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0"]
    assert (bodies(after), attempts(after)) == ([b"1", b"2"], [2, 1])


def test_progress_of_a_message_group_is_a_prefix(
    endpoint: Endpoint, topic: Make, readers: str, messages: Make, fail: Make
) -> None:
    name = topic(type="fifo", queues=1)
    endpoint.broker.send(name, messages(6, groups=["a"]))
    got = endpoint.broker.receive(readers, name)
    endpoint.broker.ack(got.take([0, 1, 4]))
    fail(readers, got.take([2]))

    [row] = endpoint.sql(
        f"SELECT committed_offset, cursor FROM progress WHERE consumer_group = '{readers}'"
        f" AND topic = '{name}'"
    )

    assert row["committed_offset"] == 2


def test_a_failing_message_ends_in_the_dead_letters_and_its_group_goes_on(
    endpoint: Endpoint, fifo: str, group: Make, messages: Make, fail: Make
) -> None:
    readers = group(order="message_group", max_attempts=2, backoff_ms=[0])
    endpoint.broker.send(fifo, messages(3, groups=["a"]))
    for _ in range(2):
        fail(readers, endpoint.broker.receive(readers, fifo, limit=1), retry_after_ms=0)

    rest = endpoint.broker.receive(readers, fifo)

    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0"]
    assert bodies(rest) == [b"1", b"2"]
    assert attempts(rest) == [1, 1]


def test_a_message_of_an_unordered_topic_has_no_group_to_wait_for(
    endpoint: Endpoint, topic: Make, readers: str, messages: Make
) -> None:
    name = topic(queues=1)
    endpoint.broker.send(name, messages(3))

    got = [bodies(endpoint.broker.receive(readers, name, limit=1)) for _ in range(3)]

    assert got == [[b"0"], [b"1"], [b"2"]]


# --------------------------------------------------------------------------------- ended leases
