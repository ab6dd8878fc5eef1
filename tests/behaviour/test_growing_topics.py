"""More queues for a topic in use: some groups move, and no message overtakes another."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmq_pipeline import errors
from rmq_pipeline.message import queue_of_groups
from tests.behaviour.conftest import Endpoint
from tests.behaviour.reopening import reopened_from_the_log

if TYPE_CHECKING:
    from tests.behaviour.conftest import Make

MINUTE = 60_000
#: Its queue among 4, 8 and 16 (semantics §3.2): it moves when 8 become 16.
MOVES, STAYS = "order-1002", "order-1001"
HOME = {4: 2, 8: 2, 16: 15}


def home_of(name: str, queues: int) -> int:
    return int(queue_of_groups(pa.array([name]), queues)[0])


def numbers(received: pa.Table) -> list[int]:
    return [int(body) for body in received["body"].to_pylist()]


def of(received: pa.Table, one: str) -> list[int]:
    rows = received.to_pylist()
    return [int(row["body"]) for row in rows if row["message_group"] == one]


@pytest.fixture
def readers(group: Make) -> str:
    return str(group(order="message_group", backoff_ms=[1_000], max_attempts=3))


# ---------------------------------------------------------------------------------- who moves


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 64), more=st.integers(1, 64))
def test_growing_moves_about_its_share_of_the_groups_and_only_to_new_queues(
    n: int, more: int
) -> None:
    names = pa.array([f"group-{i}" for i in range(4_000)])
    before, after = queue_of_groups(names, n), queue_of_groups(names, n + more)

    moved = before != after

    assert np.all(after[moved] >= n)
    share = more / (n + more)
    assert abs(moved.mean() - share) < 0.05
    # And what has come to a new queue is spread over all of them.
    if more > 1:
        assert len(np.unique(after[moved])) == more


def test_the_groups_of_these_tests_are_where_they_are_said_to_be() -> None:
    assert {n: home_of(MOVES, n) for n in HOME} == HOME
    assert {home_of(STAYS, n) for n in HOME} == {2}


# ------------------------------------------------------------------------------ order is kept


@pytest.mark.parametrize("kind", ["fifo", "mixed"])
def test_a_moved_group_comes_only_after_what_it_left_behind(
    endpoint: Endpoint, topic: Make, readers: str, messages: Make, kind: str
) -> None:
    name = topic(type=kind, queues=4)
    endpoint.broker.send(name, messages(4, groups=[MOVES]))
    first = endpoint.broker.receive(readers, name, limit=2)

    endpoint.broker.alter_topic(name, queues=16)
    endpoint.broker.send(name, messages(2, start=4, groups=[MOVES]))
    while_held = endpoint.broker.receive(readers, name)
    endpoint.broker.ack(first)
    second = endpoint.broker.receive(readers, name)
    again = endpoint.broker.receive(readers, name)
    endpoint.broker.ack(second)
    third = endpoint.broker.receive(readers, name)

    assert (numbers(first), numbers(second), numbers(third)) == ([0, 1], [2, 3], [4, 5])
    assert (while_held.num_rows, again.num_rows) == (0, 0)
    assert second["queue_id"].to_pylist() == [2, 2]
    assert third["queue_id"].to_pylist() == [15, 15]


def test_only_the_group_that_is_held_waits(
    endpoint: Endpoint, topic: Make, readers: str, messages: Make
) -> None:
    name = topic(type="fifo", queues=4)
    endpoint.broker.send(name, messages(2, groups=[MOVES]))
    held = endpoint.broker.receive(readers, name)
    endpoint.broker.alter_topic(name, queues=16)
    others = [f"g{i}" for i in range(40)]
    assert 15 in {home_of(one, 16) for one in others}

    endpoint.broker.send(name, messages(82, start=2, groups=[MOVES, STAYS, *others][:41]))
    got = endpoint.drain(name, readers)

    assert sorted(map(int, got)) == [i for i in range(2, 84) if (i - 2) % 41]
    endpoint.broker.ack(held)
    assert endpoint.drain(name, readers) == [b"2", b"43"]


def test_a_group_that_never_read_gets_old_before_new(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name = topic(type="fifo", queues=4)
    groups = [MOVES, STAYS, "a", "b", "c", "d"]
    endpoint.broker.send(name, messages(60, groups=groups))
    endpoint.broker.alter_topic(name, queues=16)
    endpoint.broker.send(name, messages(60, start=60, groups=groups))

    for limit in (7, 50, 1_000):
        late = group(order="message_group")
        seen = defaultdict(list)
        while (got := endpoint.broker.receive(late, name, limit=limit)).num_rows:
            endpoint.broker.ack(got)
            for row in got.to_pylist():
                seen[row["message_group"]].append(int(row["body"]))
        assert seen == {one: list(range(i, 120, 6)) for i, one in enumerate(groups)}


def test_each_consumer_group_waits_for_itself_only(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name = topic(type="fifo", queues=4)
    quick, slow = group(order="message_group"), group(order="message_group")
    endpoint.broker.send(name, messages(3, groups=[MOVES]))
    held = endpoint.broker.receive(slow, name)
    endpoint.drain(name, quick)

    endpoint.broker.alter_topic(name, queues=16)
    endpoint.broker.send(name, messages(3, start=3, groups=[MOVES]))

    assert endpoint.drain(name, quick) == [b"3", b"4", b"5"]
    assert endpoint.broker.receive(slow, name).num_rows == 0
    endpoint.broker.ack(held)
    assert endpoint.drain(name, slow) == [b"3", b"4", b"5"]


def test_a_group_without_order_takes_everything_at_once(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="fifo", queues=4), group()
    endpoint.broker.send(name, messages(3, groups=[MOVES]))
    endpoint.broker.receive(readers, name, limit=1)
    endpoint.broker.alter_topic(name, queues=16)
    endpoint.broker.send(name, messages(3, start=3, groups=[MOVES]))

    assert sorted(numbers(endpoint.broker.receive(readers, name))) == [1, 2, 3, 4, 5]


def test_a_poisoned_group_is_not_overtaken_in_its_new_queue(
    endpoint: Endpoint, topic: Make, readers: str, messages: Make, fail: Make
) -> None:
    name = topic(type="fifo", queues=4)
    endpoint.broker.send(name, messages(2, groups=[MOVES]))
    fail(readers, endpoint.broker.receive(readers, name, limit=1))
    endpoint.broker.alter_topic(name, queues=16)
    endpoint.broker.send(name, messages(2, start=2, groups=[MOVES]))

    seen = []
    for _ in range(2):
        assert endpoint.broker.receive(readers, name).num_rows == 0
        endpoint.advance(1_000)
        got = endpoint.broker.receive(readers, name, limit=1)
        seen += numbers(got)
        fail(readers, got)
    rest = endpoint.drain(name, readers, limit=1)

    assert seen == [0, 0]
    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0"]
    assert rest == [b"1", b"2", b"3"]


def test_a_parked_group_is_held_in_its_new_queue_too(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name = topic(type="fifo", queues=4)
    readers = group(order="message_group", max_attempts=1, on_failure="park")
    endpoint.broker.send(name, messages(4, groups=[MOVES, STAYS]))
    parked = endpoint.broker.receive(readers, name, limit=1)
    fail(readers, parked)
    endpoint.broker.alter_topic(name, queues=16)
    endpoint.broker.send(name, messages(4, start=4, groups=[MOVES, STAYS]))

    around = endpoint.drain(name, readers)
    endpoint.broker.unpark(readers)
    rest = endpoint.drain(name, readers, limit=1)

    assert numbers(parked) == [0]
    assert sorted(around) == [b"1", b"3", b"5", b"7"]
    assert rest == [b"0", b"2", b"4", b"6"]


def test_a_group_that_was_quarantined_is_in_its_new_queue_too_until_its_quarantine_is_lifted(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name = topic(type="fifo", queues=4)
    readers = group(order="message_group", max_attempts=1, on_failure="dead_letter_group")
    endpoint.broker.send(name, messages(4, groups=[MOVES, STAYS]))
    endpoint.broker.alter_topic(name, queues=16)
    fail(readers, endpoint.broker.receive(readers, name, limit=1))
    endpoint.broker.send(name, messages(4, start=4, groups=[MOVES, STAYS]))

    around = endpoint.drain(name, readers)
    endpoint.broker.unpark(readers)
    endpoint.broker.send(name, messages(2, start=8, groups=[MOVES, STAYS]))
    rest = endpoint.drain(name, readers)

    assert sorted(around) == [b"1", b"3", b"5", b"7"]
    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0", b"2", b"4", b"6"]
    assert sorted(rest) == [b"8", b"9"]


def test_a_redriven_message_of_the_old_queue_comes_before_the_new_ones(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name = topic(type="fifo", queues=4)
    readers = group(order="message_group", max_attempts=1)
    endpoint.broker.send(name, messages(2, groups=[MOVES]))
    fail(readers, endpoint.broker.receive(readers, name, limit=1))
    endpoint.broker.alter_topic(name, queues=16)
    endpoint.broker.send(name, messages(2, start=2, groups=[MOVES]))
    endpoint.broker.ack(endpoint.broker.receive(readers, name, limit=1))
    dead = pa.table({"queue_id": pa.array([0], pa.int32()), "queue_offset": [0]})

    endpoint.broker.redrive(readers, dead, redrive_id="once")

    assert endpoint.drain(name, readers, limit=1) == [b"0", b"2", b"3"]


def test_a_lease_that_ends_in_the_old_queue_comes_again_before_the_new_one(
    endpoint: Endpoint, topic: Make, readers: str, messages: Make
) -> None:
    name = topic(type="fifo", queues=4)
    endpoint.broker.send(name, messages(2, groups=[MOVES]))
    endpoint.broker.receive(readers, name, invisible_duration_ms=5_000)
    endpoint.broker.alter_topic(name, queues=16)
    endpoint.broker.send(name, messages(2, start=2, groups=[MOVES]))

    endpoint.advance(5_000)
    again = endpoint.broker.receive(readers, name)
    assert numbers(again) == [0, 1]
    endpoint.broker.ack(again)

    assert numbers(endpoint.broker.receive(readers, name)) == [2, 3]


def test_several_growths_in_a_row_keep_the_order(
    endpoint: Endpoint, topic: Make, readers: str, messages: Make
) -> None:
    name = topic(type="fifo", queues=1)
    groups = [f"g{i}" for i in range(12)]
    sizes = [1, 2, 3, 5, 8, 16]
    homes = {one: sorted({home_of(one, n) for n in sizes}) for one in groups}
    travelled = max(groups, key=lambda one: len(homes[one]))
    assert len(homes[travelled]) >= 3
    for i, queues in enumerate(sizes):
        if i:
            endpoint.broker.alter_topic(name, queues=queues)
        endpoint.broker.send(name, messages(24, start=24 * i, groups=groups))
    last = dict.fromkeys(groups, -12)
    count = 0

    while (got := endpoint.broker.receive(readers, name, limit=5)).num_rows:
        for row in got.to_pylist():
            one, number = row["message_group"], int(row["body"])
            assert number == (last[one] + 12 if last[one] >= 0 else groups.index(one))
            last[one] = number
        count += got.num_rows
        endpoint.broker.ack(got)

    assert count == 24 * len(sizes)


@pytest.mark.parametrize("how", [Endpoint.reopen, reopened_from_the_log])
def test_what_waits_for_an_old_queue_waits_across_a_restart(
    endpoint: Endpoint, topic: Make, readers: str, messages: Make, how: Any
) -> None:
    name = topic(type="fifo", queues=4)
    endpoint.broker.send(name, messages(4, groups=[MOVES, STAYS]))
    held = endpoint.broker.receive(readers, name, limit=1)
    endpoint.broker.alter_topic(name, queues=16)
    endpoint.broker.send(name, messages(4, start=4, groups=[MOVES, STAYS]))
    how(endpoint)
    in_between = endpoint.drain(name, readers)

    how(endpoint)

    assert numbers(held) == [0]
    assert in_between == [b"1", b"3", b"5", b"7"]
    assert endpoint.broker.receive(readers, name).num_rows == 0
    endpoint.broker.ack(held)
    assert numbers(endpoint.broker.receive(readers, name)) == [2]
    how(endpoint)
    assert endpoint.broker.receive(readers, name).num_rows == 0
    endpoint.advance(MINUTE)
    assert endpoint.drain(name, readers) == [b"2", b"4", b"6"]


def test_a_waiting_receive_wakes_when_the_old_queue_is_done(
    endpoint: Endpoint, topic: Make, readers: str, messages: Make
) -> None:
    name = topic(type="fifo", queues=4)
    endpoint.broker.send(name, messages(1, groups=[MOVES]))
    held = endpoint.broker.receive(readers, name)
    endpoint.broker.alter_topic(name, queues=16)
    endpoint.broker.send(name, messages(1, start=1, groups=[MOVES]))
    poll = endpoint.begin(lambda: endpoint.broker.receive(readers, name, wait_ms=30_000))

    endpoint.broker.ack(held)

    assert numbers(poll.result(60)) == [1]


def test_one_receive_gets_past_an_old_queue_that_holds_nothing_wanted(
    endpoint: Endpoint, topic: Make, readers: str, messages: Make
) -> None:
    name = topic(type="fifo", queues=4)
    endpoint.broker.send(name, messages(10, groups=[MOVES], tag="dull"))
    endpoint.broker.alter_topic(name, queues=16)
    endpoint.broker.send(name, messages(1, start=10, groups=[MOVES], tag="good"))

    assert numbers(endpoint.broker.receive(readers, name, filter="good")) == [10]


def test_a_group_put_back_to_the_beginning_takes_both_queues_in_order_again(
    endpoint: Endpoint, topic: Make, readers: str, messages: Make
) -> None:
    name = topic(type="fifo", queues=4)
    endpoint.broker.send(name, messages(5, groups=[MOVES]))
    endpoint.broker.alter_topic(name, queues=16)
    endpoint.broker.send(name, messages(5, start=5, groups=[MOVES]))
    first = endpoint.drain(name, readers, limit=2)

    endpoint.broker.reset_offset(readers, name, to_earliest=True)

    assert endpoint.drain(name, readers, limit=2) == first == [str(i).encode() for i in range(10)]


def test_a_topic_without_message_groups_grows_and_nothing_waits(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=2), group(order="message_group")
    endpoint.broker.send(name, messages(4))
    endpoint.broker.receive(readers, name, limit=2)

    endpoint.broker.alter_topic(name, queues=6)
    endpoint.broker.send(name, messages(6, start=4))

    assert endpoint.broker.receive(readers, name, limit=100).num_rows == 8


def test_a_topic_that_may_not_grow_so_is_left_as_it_is(
    endpoint: Endpoint, topic: Make, readers: str, messages: Make
) -> None:
    name = topic(type="fifo", queues=4)
    endpoint.broker.send(name, messages(2, groups=[MOVES]))

    for queues in (3, 0, 1025):
        with pytest.raises(errors.RequestError):
            endpoint.broker.alter_topic(name, queues=queues)

    assert len(endpoint.max_offsets(name)) == 4
    assert endpoint.drain(name, readers) == [b"0", b"1"]


def test_messages_that_wait_for_an_old_queue_are_not_due(
    inside: Endpoint, topic: Make, readers: str, messages: Make
) -> None:
    name = topic(type="fifo", queues=4)
    inside.broker.send(name, messages(1, groups=[MOVES]))
    held = inside.broker.receive(readers, name)
    inside.broker.alter_topic(name, queues=16)
    inside.broker.send(name, messages(2, start=1, groups=[MOVES]))
    inside.broker.receive(readers, name)

    waiting = inside.broker.due()["groups"][readers]["topics"][name]["ready"]
    inside.broker.ack(held)
    free = inside.broker.due()["groups"][readers]["topics"][name]["ready"]

    assert (waiting, free) == (0, 1)
