"""What a topic takes is said by its type; priority topics are emptied from the top."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

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
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


@pytest.fixture
def ranked(topic: Make) -> str:
    return str(topic(type="priority", queues=4))


def receive(endpoint: Endpoint, topic: str, group: str, limit: int) -> list[bytes]:
    got = endpoint.broker.receive(group, topic, limit=limit)
    endpoint.broker.ack(got)
    bodies: list[bytes] = got["body"].to_pylist()
    return bodies


@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize("sent", COLUMNS)
def test_a_topic_takes_messages_of_its_type_and_no_other(
    endpoint: Endpoint, topic: Make, messages: Make, kind: str, sent: str
) -> None:
    name = topic(type=kind)
    table = messages(2, **COLUMNS[sent])

    if sent in TAKEN[kind]:
        assert endpoint.broker.send(name, table).num_rows == 2
        return
    expected = (errors.MessageTypeError, errors.IllegalMessageGroupError)
    with pytest.raises(expected, match="Row 0"):
        endpoint.broker.send(name, table)
    assert endpoint.stored(name) == 0


# ---------------------------------------------------------------------------------------- priority


def test_a_priority_chooses_the_queue(endpoint: Endpoint, ranked: str, messages: Make) -> None:
    sent = endpoint.broker.send(ranked, messages(6, priority=[0, 1, 2, 3, 4, 2**31 - 1]))

    assert sent["queue_id"].to_pylist() == [0, 1, 2, 3, 3, 3]
    assert sent["queue_offset"].to_pylist() == [0, 0, 0, 0, 1, 2]


def priority_of(row: dict[str, Any]) -> int:
    return int(dict(row["properties"])["__PRIORITY"])


def test_a_priority_is_kept_whatever_queue_it_lies_in(
    endpoint: Endpoint, ranked: str, group: Make, messages: Make
) -> None:
    readers = group(max_attempts=1)
    given = [9, 5, 2**31 - 1, 0]
    properties = [[("p", "v")], [("__PRIORITY", "forged")], None, []]
    endpoint.broker.send(ranked, messages(4, priority=given, properties=properties))

    received = endpoint.broker.receive(readers, ranked)

    got = {row["body"]: row for row in received.to_pylist()}
    assert [priority_of(got[b"%d" % i]) for i in range(4)] == given
    assert dict(got[b"0"]["properties"])["p"] == "v"
    endpoint.broker.forward_to_dead_letter_queue(received, reason="boom")
    dead = endpoint.broker.read(f"%DLQ%{readers}", 0, offset=0, limit=4).to_pylist()
    assert sorted(map(priority_of, dead)) == sorted(given)


@pytest.mark.parametrize(
    ("priority", "error"),
    [([1, -1], errors.RequestError), ([0, None], errors.MessageTypeError)],
)
def test_a_priority_that_is_none_is_refused(
    endpoint: Endpoint,
    ranked: str,
    messages: Make,
    priority: list[int | None],
    error: type[Exception],
) -> None:
    with pytest.raises(error, match="Row 1"):
        endpoint.broker.send(ranked, messages(2, priority=priority))

    assert endpoint.stored(ranked) == 0


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
def test_a_receive_takes_the_highest_priority_first(
    endpoint: Endpoint, ranked: str, group: Make, messages: Make, limit: int
) -> None:
    readers = group()
    given = [i * 7 % 5 for i in range(40)]
    endpoint.broker.send(ranked, messages(40, priority=given))

    got: list[int] = []
    while bodies := receive(endpoint, ranked, readers, limit):
        got += map(int, bodies)

    assert got == sorted(range(40), key=lambda i: -min(given[i], 3))


def test_what_is_more_urgent_comes_before_all_that_waited_longer(
    endpoint: Endpoint, ranked: str, group: Make, messages: Make
) -> None:
    readers = group()
    endpoint.broker.send(ranked, messages(1_000, priority=0))
    assert receive(endpoint, ranked, readers, 2) == [b"0", b"1"]

    endpoint.broker.send(ranked, messages(2, start=1_000, priority=[1, 3]))

    assert receive(endpoint, ranked, readers, 3) == [b"1001", b"1000", b"2"]


def test_an_urgent_message_that_failed_comes_again_before_the_others(
    endpoint: Endpoint, ranked: str, group: Make, messages: Make, fail: Make
) -> None:
    readers = group(backoff_ms=[SECOND])
    endpoint.broker.send(ranked, messages(4, priority=[3, 0, 0, 0]))
    fail(readers, endpoint.broker.receive(readers, ranked, limit=1))
    assert receive(endpoint, ranked, readers, 1) == [b"1"]

    endpoint.advance(SECOND)

    assert receive(endpoint, ranked, readers, 2) == [b"0", b"2"]


@pytest.mark.one_endpoint
def test_the_highest_priority_first_holds_after_a_restart(
    endpoint: Endpoint, ranked: str, group: Make, messages: Make
) -> None:
    # Nothing of a queue is held in memory then: what lies in it must be looked up first.
    readers = group()
    endpoint.broker.send(ranked, messages(6_000, priority=[i % 2 * 3 for i in range(6_000)]))

    endpoint.reopen()

    got = [int(body) for body in receive(endpoint, ranked, readers, 3_000)]
    while len(got) < 6_000:
        got += map(int, receive(endpoint, ranked, readers, 3_000))
    assert got == [*range(1, 6_000, 2), *range(0, 6_000, 2)]


@pytest.mark.one_endpoint
def test_a_filter_does_not_let_lower_priorities_through_before_higher_ones(
    endpoint: Endpoint, ranked: str, group: Make, messages: Make
) -> None:
    readers = group()
    tags = ["no"] * 80_000 + ["yes"]
    endpoint.broker.send(ranked, messages(80_001, priority=3, tag=tags))
    endpoint.broker.send(ranked, messages(1, start=80_001, priority=0, tag="yes"))

    first = endpoint.broker.receive(readers, ranked, limit=1, filter="yes")
    second = endpoint.broker.receive(readers, ranked, limit=1, filter="yes")

    assert (first["body"].to_pylist(), second["body"].to_pylist()) == ([b"80000"], [b"80001"])


def test_a_priority_topic_may_grow(
    endpoint: Endpoint, ranked: str, group: Make, messages: Make
) -> None:
    readers = group()
    endpoint.broker.send(ranked, messages(2, priority=[9, 0]))

    endpoint.broker.alter_topic(ranked, queues=10)
    sent = endpoint.broker.send(ranked, messages(2, start=2, priority=[9, 4]))

    assert sent["queue_id"].to_pylist() == [9, 4]
    assert receive(endpoint, ranked, readers, 10) == [b"2", b"3", b"0", b"1"]


# ------------------------------------------------------------------------------------------- mixed


def test_a_mixed_topic_keeps_each_promise(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="mixed", queues=4), group(order="message_group")
    groups = ["a", None, "b", None, "a", None]
    levels = [None, None, None, 1, None, None]
    endpoint.broker.send(name, messages(6, message_group=groups, delay_level=levels))
    other = topic(type="fifo", queues=4)
    fifo = endpoint.broker.send(other, messages(2, groups=["a", "b"]))["queue_id"].to_pylist()

    got = endpoint.broker.receive(readers, name, limit=10).to_pylist()

    queues = {row["message_group"]: row["queue_id"] for row in got if row["message_group"]}
    assert queues == dict(zip(("a", "b"), fifo, strict=True))
    assert sorted(int(row["body"]) for row in got) == [0, 1, 2, 4, 5]
    assert [int(row["body"]) for row in got if row["message_group"] == "a"] == [0, 4]
    endpoint.advance(SECOND)
    endpoint.broker.deliver_scheduled()
    assert endpoint.broker.receive(readers, name)["body"].to_pylist() == [b"3"]


def test_a_delayed_message_of_a_group_joins_its_group_when_it_is_delivered(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(type="mixed", queues=4), group(order="message_group")
    endpoint.broker.send(name, messages(2, message_group="a", delay_level=[1, None]))
    held = endpoint.broker.receive(readers, name)
    endpoint.advance(SECOND)
    endpoint.broker.deliver_scheduled()
    endpoint.broker.send(name, messages(1, start=2, message_group="a"))

    assert held["body"].to_pylist() == [b"1"]
    assert endpoint.broker.receive(readers, name).num_rows == 0
    endpoint.broker.ack(held)
    assert endpoint.broker.receive(readers, name)["body"].to_pylist() == [b"0", b"2"]


def test_a_mixed_topic_spreads_what_has_no_group(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(type="mixed", queues=4)

    endpoint.broker.send(name, messages(40, message_group=["a"] + [None] * 39))

    assert min(endpoint.max_offsets(name)) >= 9


@pytest.mark.parametrize("bad", ["", " ", "x" * 64, "a\n"])
def test_a_message_group_of_a_mixed_topic_is_checked(
    endpoint: Endpoint, topic: Make, messages: Make, bad: str
) -> None:
    with pytest.raises(errors.IllegalMessageGroupError, match="Row 2"):
        endpoint.broker.send(topic(type="mixed"), messages(3, message_group=["a", None, bad]))
