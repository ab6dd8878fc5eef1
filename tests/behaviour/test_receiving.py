"""What receive gives, and how long it waits."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import wait
from typing import TYPE_CHECKING

import pytest

from rmq_pipeline import errors, limits, schema

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make


@pytest.fixture
def door(shared_door: Door) -> Door:
    return shared_door


def test_receive_gives_every_message_once(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=4), group()
    door.broker.send(name, messages(100))

    got = door.drain(name, readers, limit=7)

    assert Counter(got) == Counter(str(i).encode() for i in range(100))
    assert door.broker.receive(readers, name).num_rows == 0


def test_receive_gives_at_most_its_limit(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=4), group()
    door.broker.send(name, messages(100))

    sizes = [door.broker.receive(readers, name, limit=n).num_rows for n in (1, 32, 60, 100, 100)]

    assert sizes == [1, 32, 60, 7, 0]


def test_receive_gives_a_queue_in_the_order_of_its_offsets(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=3), group()
    door.broker.send(name, messages(60))

    got = door.broker.receive(readers, name, limit=60)

    places = list(zip(got["queue_id"].to_pylist(), got["queue_offset"].to_pylist(), strict=True))
    assert places == [(q, o) for q in range(3) for o in range(20)]


def test_an_empty_answer_is_an_empty_table(door: Door, topic: Make, group: Make) -> None:
    got = door.broker.receive(group(), topic())

    assert got.num_rows == 0
    assert got.schema.equals(schema.RECEIVED)


def test_every_group_gets_every_message(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, one, other = topic(), group(), group()
    door.broker.send(name, messages(10))

    first, second = door.drain(name, one), door.drain(name, other)

    assert Counter(first) == Counter(second)
    assert len(first) == 10


def test_receive_starts_with_the_earliest_message(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name = topic(queues=1)
    door.broker.send(name, messages(5))

    late = group()

    assert door.drain(name, late) == [b"0", b"1", b"2", b"3", b"4"]


def test_receivers_at_the_same_time_get_different_messages(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=4), group()
    door.broker.send(name, messages(400))

    futures = [door.pool.submit(door.broker.receive, readers, name, limit=10) for _ in range(40)]
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
    door: Door, topic: Make, group: Make, messages: Make, expression: str, expected: bytes
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(6, tag=["a", "b", None, "a", "b", "cc"]))

    got = door.broker.receive(readers, name, filter=expression)

    assert b"".join(got["body"].to_pylist()) == expected


def test_messages_a_filter_passed_over_are_done_with(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(100, tag=["a", "b"] * 50))
    got = door.broker.receive(readers, name, limit=100, filter="b")
    door.broker.ack(got)

    again = door.broker.receive(readers, name, limit=100)

    assert got.num_rows == 50
    assert again.num_rows == 0


@pytest.mark.one_endpoint
def test_a_sparse_tag_is_found_far_into_a_queue(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(60_000, tag=[*["no"] * 59_999, "yes"]))

    got = door.broker.receive(readers, name, filter="yes")

    assert got["body"].to_pylist() == [b"59999"]


def test_a_filter_keeps_the_order_of_a_message_group(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=2), group(order="message_group")
    door.broker.send(name, messages(20, groups=["g", "h"], tag=["a", "a", "b", "b"] * 5))

    got = door.broker.receive(readers, name, limit=100, filter="b")

    mine = [r["body"] for r in got.to_pylist() if r["message_group"] == "g"]
    assert mine == [b"2", b"6", b"10", b"14", b"18"]
    assert got.num_rows == 10


@pytest.mark.parametrize("reopened", [False, True])
def test_a_filter_holds_for_messages_that_waited_behind_a_blocked_group(
    door: Door, topic: Make, group: Make, messages: Make, reopened: bool
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="message_group")
    door.broker.send(name, messages(21, groups=["g"], tag=["b", *["a", "b"] * 10]))
    first = door.broker.receive(readers, name, limit=1, filter="b")
    assert door.broker.receive(readers, name, limit=100, filter="b").num_rows == 0
    if reopened:
        door.reopen()

    door.broker.ack(first)
    got = door.broker.receive(readers, name, limit=100, filter="b")

    assert got["body"].to_pylist() == [str(i).encode() for i in range(2, 21, 2)]


@pytest.mark.parametrize("expression", ["||", " || || "])
def test_a_filter_without_a_tag_is_refused(
    door: Door, topic: Make, group: Make, expression: str
) -> None:
    with pytest.raises(errors.FilterExpressionError):
        door.broker.receive(group(), topic(), filter=expression)


# --------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("limit", [0, -1, limits.RECEIVE_ROWS + 1])
def test_a_limit_out_of_range_is_refused(
    door: Door, topic: Make, group: Make, messages: Make, limit: int
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))

    with pytest.raises(errors.RequestError):
        door.broker.receive(readers, name, limit=limit)

    assert door.drain(name, readers) == [b"0"]


def test_one_receive_takes_up_to_a_hundred_thousand(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(), group()
    door.broker.send(name, messages(100_050, body=b"x"))

    got = door.broker.receive(readers, name, limit=limits.RECEIVE_ROWS)

    assert got.num_rows == limits.RECEIVE_ROWS


@pytest.mark.parametrize("duration_ms", [limits.INVISIBLE_MIN_MS, limits.INVISIBLE_MAX_MS])
def test_an_invisible_duration_within_its_range_is_taken(
    door: Door, topic: Make, group: Make, messages: Make, duration_ms: int
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    door.broker.receive(readers, name, invisible_duration_ms=duration_ms)

    door.advance(duration_ms - 1)
    before = door.broker.receive(readers, name)
    door.advance(1)
    after = door.broker.receive(readers, name)

    assert (before.num_rows, after.num_rows) == (0, 1)


@pytest.mark.parametrize(
    "duration_ms", [limits.INVISIBLE_MIN_MS - 1, -5, limits.INVISIBLE_MAX_MS + 1]
)
def test_an_invisible_duration_out_of_range_is_refused(
    door: Door, topic: Make, group: Make, messages: Make, duration_ms: int
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))

    with pytest.raises(errors.InvisibleDurationError):
        door.broker.receive(readers, name, invisible_duration_ms=duration_ms)

    assert door.drain(name, readers) == [b"0"]


# ------------------------------------------------------------------------------------ long poll


def test_long_poll_is_woken_by_an_arrival(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(), group()
    poll = door.begin(lambda: door.broker.receive(readers, name, wait_ms=30_000))

    door.broker.send(name, messages(1))

    assert poll.result(60)["body"].to_pylist() == [b"0"]


def test_long_poll_sleeps_through_arrivals_its_filter_refuses(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    poll = door.begin(lambda: door.broker.receive(readers, name, wait_ms=30_000, filter="b"))

    door.broker.send(name, messages(1, tag="a"))
    door.broker.send(name, messages(1, tag="b", start=1))

    assert poll.result(60)["body"].to_pylist() == [b"1"]


def test_long_poll_is_woken_by_the_end_of_a_lease(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(), group()
    door.broker.send(name, messages(1))
    door.broker.receive(readers, name, invisible_duration_ms=10_000)
    poll = door.begin(lambda: door.broker.receive(readers, name, wait_ms=30_000))

    door.advance(10_000)

    assert poll.result(60)["delivery_attempt"].to_pylist() == [2]


def test_long_poll_is_woken_by_the_end_of_a_backoff(
    door: Door, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(), group(backoff_ms=[5_000])
    door.broker.send(name, messages(1))
    fail(readers, door.broker.receive(readers, name))
    poll = door.begin(lambda: door.broker.receive(readers, name, wait_ms=30_000))

    door.advance(5_000)

    assert poll.result(60)["delivery_attempt"].to_pylist() == [2]


def test_long_poll_is_woken_when_a_message_group_is_unlocked(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo"), group(order="message_group")
    door.broker.send(name, messages(2, groups=["g"]))
    first = door.broker.receive(readers, name, limit=1)
    poll = door.begin(lambda: door.broker.receive(readers, name, wait_ms=30_000))

    door.broker.ack(first)

    assert poll.result(60)["body"].to_pylist() == [b"1"]


def test_long_poll_is_woken_by_a_scheduled_delivery(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="delay"), group()
    door.broker.send(name, messages(1, delay_level=1))
    poll = door.begin(lambda: door.broker.receive(readers, name, wait_ms=30_000))

    door.advance(1_000)
    door.broker.deliver_scheduled()

    assert poll.result(60)["body"].to_pylist() == [b"0"]


def test_long_poll_is_woken_by_an_offset_reset(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    door.drain(name, readers)
    poll = door.begin(lambda: door.broker.receive(readers, name, wait_ms=30_000))

    door.broker.reset_offset(readers, name, to_earliest=True)

    assert poll.result(60)["body"].to_pylist() == [b"0"]


def test_long_poll_ends_empty_when_its_time_is_up(door: Door, topic: Make, group: Make) -> None:
    name, readers = topic(), group()
    poll = door.begin(lambda: door.broker.receive(readers, name, wait_ms=5_000))

    door.advance(4_999)
    early = poll.done()
    door.advance(1)

    assert not early
    assert poll.result(60).num_rows == 0


def test_one_arrival_serves_one_of_two_long_polls(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(), group()
    polls = [
        door.begin(lambda: door.broker.receive(readers, name, wait_ms=30_000)) for _ in range(2)
    ]

    door.broker.send(name, messages(1))
    wait(polls, timeout=20, return_when="FIRST_COMPLETED")
    served = [poll.done() for poll in polls]
    door.broker.send(name, messages(1, start=1))

    assert sum(served) == 1
    assert sorted(poll.result(60)["body"][0].as_py() for poll in polls) == [b"0", b"1"]
