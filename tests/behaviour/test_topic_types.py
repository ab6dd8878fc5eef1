"""What a topic takes is said by its type; priority topics are emptied from the top."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make

SECOND = 1_000
#: What a message of each type has beside its body.
COLUMNS: dict[str, dict[str, Any]] = {
    "normal": {},
    "fifo": {"message_group": "g"},
    "delay": {"delay_level": 1},
    "time": {"deliver_at_ms": 1},
    "priority": {"priority": 3},
}
TAKEN = {
    "normal": {"normal"},
    "fifo": {"fifo"},
    "delay": {"delay", "time"},
    "priority": {"priority"},
    "mixed": {"normal", "fifo", "delay", "time"},
}


@pytest.fixture
def door(shared_door: Door) -> Door:
    return shared_door


@pytest.fixture
def ranked(topic: Make) -> str:
    return str(topic(type="priority", queues=4))


def receive(door: Door, topic: str, group: str, limit: int) -> list[bytes]:
    got = door.broker.receive(group, topic, limit=limit)
    door.broker.ack(got)
    bodies: list[bytes] = got["body"].to_pylist()
    return bodies


@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize("sent", COLUMNS)
def test_a_topic_takes_messages_of_its_type_and_no_other(
    door: Door, topic: Make, messages: Make, kind: str, sent: str
) -> None:
    name = topic(type=kind)
    table = messages(2, **COLUMNS[sent])

    if sent in TAKEN[kind]:
        assert door.broker.send(name, table).num_rows == 2
        return
    expected = (errors.MessageTypeError, errors.IllegalMessageGroupError)
    with pytest.raises(expected, match="Row 0"):
        door.broker.send(name, table)
    assert door.stored(name) == 0


# ---------------------------------------------------------------------------------------- priority


def test_a_priority_chooses_the_queue(door: Door, ranked: str, messages: Make) -> None:
    sent = door.broker.send(ranked, messages(6, priority=[0, 1, 2, 3, 4, 2**31 - 1]))

    assert sent["queue_id"].to_pylist() == [0, 1, 2, 3, 3, 3]
    assert sent["queue_offset"].to_pylist() == [0, 0, 0, 0, 1, 2]


def priority_of(row: dict[str, Any]) -> int:
    return int(dict(row["properties"])["__PRIORITY"])


def test_a_priority_is_kept_whatever_queue_it_lies_in(
    door: Door, ranked: str, group: Make, messages: Make
) -> None:
    readers = group(max_attempts=1)
    given = [9, 5, 2**31 - 1, 0]
    properties = [[("p", "v")], [("__PRIORITY", "forged")], None, []]
    door.broker.send(ranked, messages(4, priority=given, properties=properties))

    received = door.broker.receive(readers, ranked)

    got = {row["body"]: row for row in received.to_pylist()}
    assert [priority_of(got[b"%d" % i]) for i in range(4)] == given
    assert dict(got[b"0"]["properties"])["p"] == "v"
    door.broker.forward_to_dead_letter_queue(received, reason="boom")
    dead = door.broker.read(f"%DLQ%{readers}", 0, offset=0, limit=4).to_pylist()
    assert sorted(map(priority_of, dead)) == sorted(given)


@pytest.mark.parametrize(
    ("priority", "error"),
    [([1, -1], errors.RequestError), ([0, None], errors.MessageTypeError)],
)
def test_a_priority_that_is_none_is_refused(
    door: Door, ranked: str, messages: Make, priority: list[int | None], error: type[Exception]
) -> None:
    with pytest.raises(error, match="Row 1"):
        door.broker.send(ranked, messages(2, priority=priority))

    assert door.stored(ranked) == 0


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
def test_a_receive_takes_the_highest_priority_first(
    door: Door, ranked: str, group: Make, messages: Make, limit: int
) -> None:
    readers = group()
    given = [i * 7 % 5 for i in range(40)]
    door.broker.send(ranked, messages(40, priority=given))

    got: list[int] = []
    while bodies := receive(door, ranked, readers, limit):
        got += map(int, bodies)

    assert got == sorted(range(40), key=lambda i: -min(given[i], 3))


def test_what_is_more_urgent_comes_before_all_that_waited_longer(
    door: Door, ranked: str, group: Make, messages: Make
) -> None:
    readers = group()
    door.broker.send(ranked, messages(1_000, priority=0))
    assert receive(door, ranked, readers, 2) == [b"0", b"1"]

    door.broker.send(ranked, messages(2, start=1_000, priority=[1, 3]))

    assert receive(door, ranked, readers, 3) == [b"1001", b"1000", b"2"]


def test_an_urgent_message_that_failed_comes_again_before_the_others(
    door: Door, ranked: str, group: Make, messages: Make, fail: Make
) -> None:
    readers = group(backoff_ms=[SECOND])
    door.broker.send(ranked, messages(4, priority=[3, 0, 0, 0]))
    fail(readers, door.broker.receive(readers, ranked, limit=1))
    assert receive(door, ranked, readers, 1) == [b"1"]

    door.advance(SECOND)

    assert receive(door, ranked, readers, 2) == [b"0", b"2"]


@pytest.mark.one_endpoint
def test_the_highest_priority_first_holds_after_a_restart(
    door: Door, ranked: str, group: Make, messages: Make
) -> None:
    # Nothing of a queue is held in memory then: what lies in it must be looked up first.
    readers = group()
    door.broker.send(ranked, messages(6_000, priority=[i % 2 * 3 for i in range(6_000)]))

    door.reopen()

    got = [int(body) for body in receive(door, ranked, readers, 3_000)]
    while len(got) < 6_000:
        got += map(int, receive(door, ranked, readers, 3_000))
    assert got == [*range(1, 6_000, 2), *range(0, 6_000, 2)]


@pytest.mark.one_endpoint
def test_a_filter_does_not_let_lower_priorities_through_before_higher_ones(
    door: Door, ranked: str, group: Make, messages: Make
) -> None:
    readers = group()
    tags = ["no"] * 80_000 + ["yes"]
    door.broker.send(ranked, messages(80_001, priority=3, tag=tags))
    door.broker.send(ranked, messages(1, start=80_001, priority=0, tag="yes"))

    first = door.broker.receive(readers, ranked, limit=1, filter="yes")
    second = door.broker.receive(readers, ranked, limit=1, filter="yes")

    assert (first["body"].to_pylist(), second["body"].to_pylist()) == ([b"80000"], [b"80001"])


def test_a_priority_topic_may_grow(door: Door, ranked: str, group: Make, messages: Make) -> None:
    readers = group()
    door.broker.send(ranked, messages(2, priority=[9, 0]))

    door.broker.alter_topic(ranked, queues=10)
    sent = door.broker.send(ranked, messages(2, start=2, priority=[9, 4]))

    assert sent["queue_id"].to_pylist() == [9, 4]
    assert receive(door, ranked, readers, 10) == [b"2", b"3", b"0", b"1"]


# ------------------------------------------------------------------------------------------- mixed


def test_a_mixed_topic_keeps_each_promise(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="mixed", queues=4), group(order="message_group")
    groups = ["a", None, "b", None, "a", None]
    levels = [None, None, None, 1, None, None]
    door.broker.send(name, messages(6, message_group=groups, delay_level=levels))
    other = topic(type="fifo", queues=4)
    fifo = door.broker.send(other, messages(2, groups=["a", "b"]))["queue_id"].to_pylist()

    got = door.broker.receive(readers, name, limit=10).to_pylist()

    queues = {row["message_group"]: row["queue_id"] for row in got if row["message_group"]}
    assert queues == dict(zip(("a", "b"), fifo, strict=True))
    assert sorted(int(row["body"]) for row in got) == [0, 1, 2, 4, 5]
    assert [int(row["body"]) for row in got if row["message_group"] == "a"] == [0, 4]
    door.advance(SECOND)
    door.broker.deliver_scheduled()
    assert door.broker.receive(readers, name)["body"].to_pylist() == [b"3"]


def test_a_delayed_message_of_a_group_joins_its_group_when_it_is_delivered(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="mixed", queues=4), group(order="message_group")
    door.broker.send(name, messages(2, message_group="a", delay_level=[1, None]))
    held = door.broker.receive(readers, name)
    door.advance(SECOND)
    door.broker.deliver_scheduled()
    door.broker.send(name, messages(1, start=2, message_group="a"))

    assert held["body"].to_pylist() == [b"1"]
    assert door.broker.receive(readers, name).num_rows == 0
    door.broker.ack(held)
    assert door.broker.receive(readers, name)["body"].to_pylist() == [b"0", b"2"]


def test_a_mixed_topic_spreads_what_has_no_group(door: Door, topic: Make, messages: Make) -> None:
    name = topic(type="mixed", queues=4)

    door.broker.send(name, messages(40, message_group=["a"] + [None] * 39))

    assert min(door.max_offsets(name)) >= 9


@pytest.mark.parametrize("bad", ["", " ", "x" * 64, "a\n"])
def test_a_message_group_of_a_mixed_topic_is_checked(
    door: Door, topic: Make, messages: Make, bad: str
) -> None:
    with pytest.raises(errors.IllegalMessageGroupError, match="Row 2"):
        door.broker.send(topic(type="mixed"), messages(3, message_group=["a", None, bad]))
