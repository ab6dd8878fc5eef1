"""What receive gives, and how long it waits."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import wait
from typing import TYPE_CHECKING

import pytest

from rmq_pipeline import errors, limits, schema

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


def test_receive_gives_every_message_once(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=4), group()
    endpoint.broker.send(name, messages(100))

    got = endpoint.drain(name, readers, limit=7)

    assert Counter(got) == Counter(str(i).encode() for i in range(100))
    assert endpoint.broker.receive(readers, name).num_rows == 0


def test_receive_gives_at_most_its_limit(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=4), group()
    endpoint.broker.send(name, messages(100))

    sizes = [
        endpoint.broker.receive(readers, name, limit=n).num_rows for n in (1, 32, 60, 100, 100)
    ]

    assert sizes == [1, 32, 60, 7, 0]


def test_receive_gives_a_queue_in_the_order_of_its_offsets(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=3), group()
    endpoint.broker.send(name, messages(60))

    got = endpoint.broker.receive(readers, name, limit=60)

    places = list(zip(got["queue_id"].to_pylist(), got["queue_offset"].to_pylist(), strict=True))
    assert places == [(q, o) for q in range(3) for o in range(20)]


def test_an_empty_answer_is_an_empty_table(endpoint: Endpoint, topic: Make, group: Make) -> None:
    got = endpoint.broker.receive(group(), topic())

    assert got.num_rows == 0
    assert got.schema.equals(schema.RECEIVED)


def test_every_group_gets_every_message(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, one, other = topic(), group(), group()
    endpoint.broker.send(name, messages(10))

    first, second = endpoint.drain(name, one), endpoint.drain(name, other)

    assert Counter(first) == Counter(second)
    assert len(first) == 10


def test_receive_starts_with_the_earliest_message(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name = topic(queues=1)
    endpoint.broker.send(name, messages(5))

    late = group()

    assert endpoint.drain(name, late) == [b"0", b"1", b"2", b"3", b"4"]


def test_receivers_at_the_same_time_get_different_messages(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=4), group()
    endpoint.broker.send(name, messages(400))

    futures = [
        endpoint.pool.submit(endpoint.broker.receive, readers, name, limit=10) for _ in range(40)
    ]
    wait(futures)

    got = [body for f in futures for body in f.result()["body"].to_pylist()]
    assert Counter(got) == Counter(str(i).encode() for i in range(400))


# -------------------------------------------------------------------------------------- filter


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("*", b"012345"),
        ("", b"012345"),
        ("a", b"03"),
        ("a||b", b"0134"),
        (" a || b ", b"0134"),
        ("a || ", b"03"),
        ("nobody", b""),
        ("A", b""),
        ("c", b""),
    ],
)
def test_receive_gives_only_the_tags_of_its_filter(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, expression: str, expected: bytes
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(6, tag=["a", "b", None, "a", "b", "cc"]))

    got = endpoint.broker.receive(readers, name, filter=expression)

    assert b"".join(got["body"].to_pylist()) == expected


def test_messages_a_filter_passed_over_are_done_with(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(100, tag=["a", "b"] * 50))
    got = endpoint.broker.receive(readers, name, limit=100, filter="b")
    endpoint.broker.ack(got)

    again = endpoint.broker.receive(readers, name, limit=100)

    assert got.num_rows == 50
    assert again.num_rows == 0


@pytest.mark.one_endpoint
def test_a_sparse_tag_is_found_far_into_a_queue(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(60_000, tag=[*["no"] * 59_999, "yes"]))

    got = endpoint.broker.receive(readers, name, filter="yes")

    assert got["body"].to_pylist() == [b"59999"]


def test_a_filter_keeps_the_order_of_a_message_group(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=2), group(order="message_group")
    endpoint.broker.send(name, messages(20, groups=["g", "h"], tag=["a", "a", "b", "b"] * 5))

    got = endpoint.broker.receive(readers, name, limit=100, filter="b")

    mine = [r["body"] for r in got.to_pylist() if r["message_group"] == "g"]
    assert mine == [b"2", b"6", b"10", b"14", b"18"]
    assert got.num_rows == 10


@pytest.mark.parametrize("reopened", [False, True])
def test_a_filter_holds_for_messages_that_waited_behind_a_blocked_group(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, reopened: bool
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="message_group")
    endpoint.broker.send(name, messages(21, groups=["g"], tag=["b", *["a", "b"] * 10]))
    first = endpoint.broker.receive(readers, name, limit=1, filter="b")
    assert endpoint.broker.receive(readers, name, limit=100, filter="b").num_rows == 0
    if reopened:
        endpoint.reopen()

    endpoint.broker.ack(first)
    got = endpoint.broker.receive(readers, name, limit=100, filter="b")

    assert got["body"].to_pylist() == [str(i).encode() for i in range(2, 21, 2)]


@pytest.mark.parametrize("expression", ["||", " || || "])
def test_a_filter_without_a_tag_is_refused(
    endpoint: Endpoint, topic: Make, group: Make, expression: str
) -> None:
    with pytest.raises(errors.FilterExpressionError):
        endpoint.broker.receive(group(), topic(), filter=expression)


# --------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("limit", [0, -1, limits.RECEIVE_ROWS + 1])
def test_a_limit_out_of_range_is_refused(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, limit: int
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))

    with pytest.raises(errors.RequestError):
        endpoint.broker.receive(readers, name, limit=limit)

    assert endpoint.drain(name, readers) == [b"0"]


def test_one_receive_takes_up_to_a_hundred_thousand(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(), group()
    endpoint.broker.send(name, messages(100_050, body=b"x"))

    got = endpoint.broker.receive(readers, name, limit=limits.RECEIVE_ROWS)

    assert got.num_rows == limits.RECEIVE_ROWS


@pytest.mark.parametrize("duration_ms", [limits.INVISIBLE_MIN_MS, limits.INVISIBLE_MAX_MS])
def test_an_invisible_duration_within_its_range_is_taken(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, duration_ms: int
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    endpoint.broker.receive(readers, name, invisible_duration_ms=duration_ms)

    endpoint.advance(duration_ms - 1)
    before = endpoint.broker.receive(readers, name)
    endpoint.advance(1)
    after = endpoint.broker.receive(readers, name)

    assert (before.num_rows, after.num_rows) == (0, 1)


@pytest.mark.parametrize(
    "duration_ms", [limits.INVISIBLE_MIN_MS - 1, -5, limits.INVISIBLE_MAX_MS + 1]
)
def test_an_invisible_duration_out_of_range_is_refused(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, duration_ms: int
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))

    with pytest.raises(errors.InvisibleDurationError):
        endpoint.broker.receive(readers, name, invisible_duration_ms=duration_ms)

    assert endpoint.drain(name, readers) == [b"0"]


# ------------------------------------------------------------------------------------ long poll


def test_long_poll_is_woken_by_an_arrival(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(), group()
    poll = endpoint.begin(lambda: endpoint.broker.receive(readers, name, wait_ms=30_000))

    endpoint.broker.send(name, messages(1))

    assert poll.result(60)["body"].to_pylist() == [b"0"]


def test_long_poll_ignores_messages_that_its_filter_refuses(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    poll = endpoint.begin(
        lambda: endpoint.broker.receive(readers, name, wait_ms=30_000, filter="b")
    )

    endpoint.broker.send(name, messages(1, tag="a"))
    endpoint.broker.send(name, messages(1, tag="b", start=1))

    assert poll.result(60)["body"].to_pylist() == [b"1"]


def test_long_poll_is_woken_by_the_end_of_a_lease(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(), group()
    endpoint.broker.send(name, messages(1))
    endpoint.broker.receive(readers, name, invisible_duration_ms=10_000)
    poll = endpoint.begin(lambda: endpoint.broker.receive(readers, name, wait_ms=30_000))

    endpoint.advance(10_000)

    assert poll.result(60)["delivery_attempt"].to_pylist() == [2]


def test_long_poll_is_woken_by_the_end_of_a_backoff(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(), group(backoff_ms=[5_000])
    endpoint.broker.send(name, messages(1))
    fail(readers, endpoint.broker.receive(readers, name))
    poll = endpoint.begin(lambda: endpoint.broker.receive(readers, name, wait_ms=30_000))

    endpoint.advance(5_000)

    assert poll.result(60)["delivery_attempt"].to_pylist() == [2]


def test_long_poll_is_woken_when_a_message_group_is_unlocked(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo"), group(order="message_group")
    endpoint.broker.send(name, messages(2, groups=["g"]))
    first = endpoint.broker.receive(readers, name, limit=1)
    poll = endpoint.begin(lambda: endpoint.broker.receive(readers, name, wait_ms=30_000))

    endpoint.broker.ack(first)

    assert poll.result(60)["body"].to_pylist() == [b"1"]


def test_long_poll_is_woken_by_a_scheduled_delivery(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="delay"), group()
    endpoint.broker.send(name, messages(1, delay_level=1))
    poll = endpoint.begin(lambda: endpoint.broker.receive(readers, name, wait_ms=30_000))

    endpoint.advance(1_000)
    endpoint.broker.deliver_scheduled()

    assert poll.result(60)["body"].to_pylist() == [b"0"]


def test_long_poll_is_woken_by_an_offset_reset(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    endpoint.drain(name, readers)
    poll = endpoint.begin(lambda: endpoint.broker.receive(readers, name, wait_ms=30_000))

    endpoint.broker.reset_offset(readers, name, to_earliest=True)

    assert poll.result(60)["body"].to_pylist() == [b"0"]


def test_long_poll_ends_empty_when_its_time_is_up(
    endpoint: Endpoint, topic: Make, group: Make
) -> None:
    name, readers = topic(), group()
    poll = endpoint.begin(lambda: endpoint.broker.receive(readers, name, wait_ms=5_000))

    endpoint.advance(4_999)
    early = poll.done()
    endpoint.advance(1)

    assert not early
    assert poll.result(60).num_rows == 0


def test_one_arrival_serves_one_of_two_long_polls(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(), group()
    polls = [
        endpoint.begin(lambda: endpoint.broker.receive(readers, name, wait_ms=30_000))
        for _ in range(2)
    ]

    endpoint.broker.send(name, messages(1))
    wait(polls, timeout=20, return_when="FIRST_COMPLETED")
    served = [poll.done() for poll in polls]
    endpoint.broker.send(name, messages(1, start=1))

    assert sum(served) == 1
    assert sorted(poll.result(60)["body"][0].as_py() for poll in polls) == [b"0", b"1"]
