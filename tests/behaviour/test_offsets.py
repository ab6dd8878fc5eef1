"""Offsets: reading by them, finding them by time, and setting a group to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

MINUTE = 60_000


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


@pytest.fixture
def name(topic: Make) -> str:
    return str(topic(queues=1))


@pytest.mark.parametrize(
    ("offset", "limit", "expected"),
    [(0, 3, [0, 1, 2]), (7, 100, [7, 8, 9]), (9, 1, [9]), (10, 5, []), (4, 2, [4, 5])],
)
def test_read_gives_the_messages_from_an_offset(
    endpoint: Endpoint, name: str, messages: Make, offset: int, limit: int, expected: list[int]
) -> None:
    endpoint.broker.send(name, messages(10))

    found = endpoint.broker.read(name, 0, offset=offset, limit=limit)

    assert found["queue_offset"].to_pylist() == expected
    assert found["body"].to_pylist() == [str(i).encode() for i in expected]


def test_reading_leases_nothing(endpoint: Endpoint, name: str, group: Make, messages: Make) -> None:
    readers = group()
    endpoint.broker.send(name, messages(3))

    endpoint.broker.read(name, 0, offset=0, limit=3)

    assert endpoint.drain(name, readers) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("offset", [-1, 11, 1_000_000])
def test_reading_outside_the_queue_is_refused(
    endpoint: Endpoint, name: str, messages: Make, offset: int
) -> None:
    endpoint.broker.send(name, messages(10))

    with pytest.raises(errors.IllegalOffsetError):
        endpoint.broker.read(name, 0, offset=offset, limit=1)


@pytest.mark.parametrize("queue_id", [-1, 1, 99])
def test_a_queue_the_topic_does_not_have_is_refused(
    endpoint: Endpoint, name: str, queue_id: int
) -> None:
    with pytest.raises((errors.RequestError, errors.NotFoundError)):
        endpoint.broker.read(name, queue_id, offset=0, limit=1)
    with pytest.raises((errors.RequestError, errors.NotFoundError)):
        endpoint.broker.offset_at(name, queue_id, at_ms=0)


def test_the_offset_at_a_time_is_the_first_stored_then_or_later(
    endpoint: Endpoint, name: str, messages: Make
) -> None:
    start = endpoint.clock.now_ms()
    for i in range(5):
        endpoint.broker.send(name, messages(2, start=2 * i))
        endpoint.advance(100)
    moments = [-1_000, 0, 1, 99, 100, 101, 400, 401, 10_000]

    found = [endpoint.broker.offset_at(name, 0, at_ms=start + at) for at in moments]

    assert found == [0, 0, 2, 2, 2, 4, 8, 10, 10]


#: Wrongly computed: below 0, and µs taken for ms. RocketMQ takes the first for the end.
NO_TIMES = [-1, -1_893_456_000_000, 1_893_456_000_000_000]


@pytest.mark.parametrize("at_ms", NO_TIMES)
def test_an_invalid_time_moves_no_group_and_names_no_offset(
    endpoint: Endpoint, name: str, group: Make, messages: Make, at_ms: int
) -> None:
    readers, beginners = group(), group()
    endpoint.broker.send(name, messages(10))

    refused = []
    for ask in (
        lambda: endpoint.broker.offset_at(name, 0, at_ms=at_ms),
        lambda: endpoint.broker.reset_offset(readers, name, to_time_ms=at_ms),
        lambda: endpoint.broker.start_offsets(beginners, name, where=at_ms),
        lambda: endpoint.broker.find(name, from_ms=at_ms),
        lambda: endpoint.broker.find(name, to_ms=at_ms),
    ):
        with pytest.raises(errors.RequestError, match="in ms since 1970") as refusal:
            ask()
        refused.append(refusal.value.remedy)

    assert set(refused) == {
        "Check how the time was computed. The end of a queue has a name of its own."
    }
    assert endpoint.broker.committed_offsets(beginners, name) == {0: (-1, 0)}
    assert len(endpoint.drain(name, readers)) == 10


def test_the_offset_of_an_empty_queue_is_its_end(endpoint: Endpoint, name: str) -> None:
    assert endpoint.broker.offset_at(name, 0, at_ms=endpoint.clock.now_ms()) == 0


# ----------------------------------------------------------------------------------------- reset


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({"to_offset": 7}, 7),
        ({"to_offset": 0}, 0),
        ({"to_offset": 10}, 10),
        ({"to_time_ms": 350}, 8),
        ({"to_latest": True}, 10),
        ({"to_earliest": True}, 0),
    ],
)
def test_a_group_reads_on_from_where_it_was_set(
    endpoint: Endpoint,
    name: str,
    group: Make,
    messages: Make,
    target: dict[str, Any],
    expected: int,
) -> None:
    readers = group()
    start = endpoint.clock.now_ms()
    for i in range(5):
        endpoint.broker.send(name, messages(2, start=2 * i))
        endpoint.advance(100)
    half = endpoint.broker.receive(readers, name, limit=5)
    endpoint.broker.ack(half)

    if "to_time_ms" in target:
        target = {"to_time_ms": start + target["to_time_ms"]}
    answer = endpoint.broker.reset_offset(readers, name, **target)

    assert answer.to_pylist() == [{"queue_id": 0, "queue_offset": expected}]
    assert endpoint.drain(name, readers) == [str(i).encode() for i in range(expected, 10)]


def test_a_reset_ends_the_leases_in_flight(
    endpoint: Endpoint, name: str, group: Make, messages: Make
) -> None:
    readers = group()
    endpoint.broker.send(name, messages(5))
    got = endpoint.broker.receive(readers, name, limit=3)

    endpoint.broker.reset_offset(readers, name, to_earliest=True)

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(got)
    again = endpoint.broker.receive(readers, name)
    assert again["body"].to_pylist() == [b"0", b"1", b"2", b"3", b"4"]
    assert again["delivery_attempt"].to_pylist() == [1] * 5


def test_a_reset_to_the_end_leaves_nothing_to_retry(
    endpoint: Endpoint, name: str, group: Make, messages: Make, fail: Make
) -> None:
    readers = group()
    endpoint.broker.send(name, messages(5))
    fail(readers, endpoint.broker.receive(readers, name, limit=2))
    endpoint.broker.receive(readers, name, limit=2, invisible_duration_ms=1_000)

    endpoint.broker.reset_offset(readers, name, to_latest=True)
    endpoint.advance(10 * MINUTE)
    endpoint.broker.revive()

    assert endpoint.broker.receive(readers, name).num_rows == 0
    endpoint.broker.send(name, messages(1, start=5))
    assert endpoint.drain(name, readers) == [b"5"]


def test_a_reset_unlocks_message_groups_and_forgets_their_backlog(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="message_group")
    endpoint.broker.send(name, messages(10, groups=["a", "b"]))
    endpoint.broker.receive(readers, name, limit=1, invisible_duration_ms=10 * MINUTE)
    endpoint.drain(name, readers)

    endpoint.broker.reset_offset(readers, name, to_offset=6)

    assert endpoint.drain(name, readers) == [b"6", b"7", b"8", b"9"]
    endpoint.broker.reset_offset(readers, name, to_offset=2)
    got = endpoint.broker.receive(readers, name).to_pylist()
    assert [r["body"] for r in got if r["message_group"] == "a"] == [b"2", b"4", b"6", b"8"]
    assert [r["body"] for r in got if r["message_group"] == "b"] == [b"3", b"5", b"7", b"9"]


def test_a_reset_concerns_one_group_only(
    endpoint: Endpoint, name: str, group: Make, messages: Make
) -> None:
    mine, theirs = group(), group()
    endpoint.broker.send(name, messages(4))
    endpoint.drain(name, mine)
    got = endpoint.broker.receive(theirs, name)

    endpoint.broker.reset_offset(mine, name, to_earliest=True)

    endpoint.broker.ack(got)
    assert len(endpoint.drain(name, mine)) == 4


def test_one_queue_may_be_reset_alone(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=3), group()
    endpoint.broker.send(name, messages(9))
    endpoint.drain(name, readers)

    answer = endpoint.broker.reset_offset(readers, name, to_earliest=True, queue_id=1)

    assert answer.to_pylist() == [{"queue_id": 1, "queue_offset": 0}]
    got = endpoint.broker.receive(readers, name)
    assert got["queue_id"].to_pylist() == [1, 1, 1]


def test_every_queue_is_reset_to_its_own_offset_of_a_time(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=2), group()
    endpoint.broker.send(name, messages(4))
    endpoint.advance(100)
    at_ms = endpoint.clock.now_ms()
    endpoint.broker.send(name, messages(6, start=4))
    endpoint.drain(name, readers)

    answer = endpoint.broker.reset_offset(readers, name, to_time_ms=at_ms)

    assert sorted(answer["queue_offset"].to_pylist()) == [2, 2]
    assert sorted(endpoint.drain(name, readers)) == [str(i).encode() for i in range(4, 10)]


@pytest.mark.parametrize("offset", [-1, 5])
def test_a_reset_outside_the_queue_is_refused(
    endpoint: Endpoint, name: str, group: Make, messages: Make, offset: int
) -> None:
    readers = group()
    endpoint.broker.send(name, messages(3))
    got = endpoint.broker.receive(readers, name)

    with pytest.raises(errors.RequestError):
        endpoint.broker.reset_offset(readers, name, to_offset=offset)

    endpoint.broker.ack(got)


@pytest.mark.parametrize("target", [{}, {"to_offset": 1, "to_latest": True}])
def test_a_reset_names_one_target(
    endpoint: Endpoint, name: str, group: Make, messages: Make, target: dict[str, Any]
) -> None:
    readers = group()
    endpoint.broker.send(name, messages(3))
    got = endpoint.broker.receive(readers, name)

    with pytest.raises(errors.RequestError):
        endpoint.broker.reset_offset(readers, name, **target)

    endpoint.broker.ack(got)


def test_a_reset_wins_over_a_group_that_has_read_nothing(
    endpoint: Endpoint, name: str, group: Make, messages: Make
) -> None:
    readers = group()
    endpoint.broker.send(name, messages(3))

    endpoint.broker.reset_offset(readers, name, to_latest=True)

    assert endpoint.drain(name, readers) == []
