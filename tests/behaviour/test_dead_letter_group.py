"""With dead_letter_group one final failure gives its message group up, until it is pardoned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make

SAID = {"reason": "no engine", "error_type": "EngineError", "run_id": "run-1"}
Condemn = Callable[..., tuple[str, str]]


def dead(door: Door, group: str) -> list[int]:
    return [int(body) for body in door.bodies(f"%DLQ%{group}")]


@pytest.fixture
def condemn(door: Door, topic: Make, group: Make, messages: Make, fail: Make) -> Condemn:
    """``condemn(n)``: n messages of the groups a and b in turn, a given up with its first one."""

    def make(n: int = 8, limit: int = 1) -> tuple[str, str]:
        name = topic(type="fifo", queues=1)
        readers = group(order="message_group", max_attempts=1, on_failure="dead_letter_group")
        door.broker.send(name, messages(n, groups=["a", "b"]))
        got = door.broker.receive(readers, name, limit=limit)
        fail(readers, got.slice(0, 1), **SAID)
        return name, readers

    return make


@pytest.mark.every_endpoint
def test_what_follows_the_failed_message_goes_to_the_dead_letters_in_order(
    door: Door, condemn: Condemn
) -> None:
    name, readers = condemn()

    assert door.drain(name, readers) == [b"1", b"3", b"5", b"7"]
    assert dead(door, readers) == [0, 2, 4, 6]


def test_what_was_delivered_with_it_goes_too(door: Door, condemn: Condemn) -> None:
    _, readers = condemn(limit=6)

    assert dead(door, readers) == [0, 2, 4]
    rows = door.sql("SELECT attempts FROM dead_letters ORDER BY queue_offset")
    assert [row["attempts"] for row in rows] == [1, 0, 0]


def test_what_comes_later_goes_too(door: Door, condemn: Condemn, messages: Make) -> None:
    name, readers = condemn(2)
    door.drain(name, readers)
    door.broker.send(name, messages(3_000, start=2, groups=["a", "b"]))

    assert [int(b) % 2 for b in door.drain(name, readers, limit=200)] == [1] * 1_500
    assert dead(door, readers) == list(range(0, 3_002, 2))


def test_what_waited_behind_the_cursor_goes_too(
    door: Door, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(order="message_group", max_attempts=1, on_failure="dead_letter_group")
    door.broker.send(name, messages(5_000, groups=["a", "b"]))
    first = door.broker.receive(readers, name, limit=1)
    door.drain(name, readers, limit=500)

    fail(readers, first)

    assert door.drain(name, readers) == []
    assert dead(door, readers) == list(range(0, 5_000, 2))


@pytest.mark.parametrize("pardoned", [False, True])
def test_what_follows_is_copied_when_nothing_before_it_is_with_a_receiver_any_more(
    door: Door, topic: Make, group: Make, messages: Make, outcomes: Make, pardoned: bool
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(order="message_group", on_failure="dead_letter_group")
    door.broker.send(name, messages(4, groups=["a"]))
    got = door.broker.receive(readers, name, limit=2)
    door.broker.settle(readers, outcomes(got.slice(1), "dead_letter"))

    assert door.drain(name, readers) == []
    before = dead(door, readers)
    if pardoned:
        assert door.broker.unpark(readers)["lifted"] == 1
    door.broker.ack(got.slice(0, 1))
    after = door.drain(name, readers)

    assert before == [1]
    assert after == ([b"2", b"3"] if pardoned else [])
    assert dead(door, readers) == ([1] if pardoned else [1, 2, 3])


def test_the_last_ended_lease_gives_the_message_group_up(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(order="message_group", max_attempts=1, on_failure="dead_letter_group")
    door.broker.send(name, messages(4, groups=["a"]))
    door.broker.receive(readers, name, limit=2, invisible_duration_ms=1_000)
    door.advance(1_000)

    door.broker.revive()

    assert door.drain(name, readers) == []
    assert dead(door, readers) == [0, 1, 2, 3]


def test_those_that_follow_say_for_which_failure_they_went(door: Door, condemn: Condemn) -> None:
    name, readers = condemn()
    door.drain(name, readers)

    rows = door.sql(
        "SELECT reason, error_type, run_id, signature FROM dead_letters ORDER BY queue_offset"
    )

    follow = {**SAID, "reason": "an earlier message of its group failed: no engine"}
    signatures = {row.pop("signature") for row in rows}
    assert rows == [SAID, follow, follow, follow]
    assert len(signatures) == 1


def test_what_is_given_up_is_seen(door: Door, condemn: Condemn) -> None:
    name, readers = condemn()

    [row] = door.sql(
        "SELECT consumer_group, topic, message_group, queue_offset, reason FROM quarantined_groups"
    )

    assert row == {
        "consumer_group": readers,
        "topic": name,
        "message_group": "a",
        "queue_offset": 0,
        "reason": "no engine",
    }


def test_the_view_has_its_earlier_name_for_one_release(door: Door, condemn: Condemn) -> None:
    _, readers = condemn()

    now = door.sql("SELECT * EXCLUDE quarantined_at_ms, quarantined_at_ms FROM quarantined_groups")
    before = door.sql("SELECT * EXCLUDE condemned_at_ms, condemned_at_ms FROM condemned")

    assert [tuple(row.values()) for row in now] == [tuple(row.values()) for row in before]
    assert [row["consumer_group"] for row in now] == [readers]


def test_a_pardoned_message_group_is_delivered_again(
    door: Door, condemn: Condemn, messages: Make
) -> None:
    name, readers = condemn(4)
    door.drain(name, readers)

    groups = pa.table({"message_group": ["a"]})
    answer = door.broker.unpark(readers, message_groups=groups)

    assert answer == {"unparked": 0, "skipped": 0, "lifted": 1, "pardoned": 1}
    door.broker.send(name, messages(2, start=4, groups=["a"]))
    assert door.drain(name, readers) == [b"4", b"5"]
    assert dead(door, readers) == [0, 2]


def test_only_tagged_messages_that_are_wanted_are_given_up(
    door: Door, condemn: Condemn, messages: Make
) -> None:
    name, readers = condemn(2)
    door.broker.send(name, messages(4, start=2, groups=["a"], tag=["x", "y", "x", "y"]))

    while (got := door.broker.receive(readers, name, filter="x")).num_rows:
        door.broker.ack(got)

    assert dead(door, readers) == [0, 2, 4]


def test_without_order_the_message_goes_alone(
    door: Door, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(max_attempts=1, on_failure="dead_letter_group")
    door.broker.send(name, messages(3))
    fail(readers, door.broker.receive(readers, name, limit=1))

    assert door.drain(name, readers) == [b"1", b"2"]
    assert dead(door, readers) == [0]


def test_a_message_the_consumer_calls_hopeless_gives_its_group_up(
    door: Door, topic: Make, group: Make, messages: Make, outcomes: Make
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(order="message_group", on_failure="dead_letter_group")
    door.broker.send(name, messages(4, groups=["a"]))
    got = door.broker.receive(readers, name, limit=3)

    settled = outcomes(got, ["ack", "dead_letter", "retry"])
    answer = door.broker.settle(readers, settled)

    assert answer == {"acked": 1, "retried": 0, "dead_lettered": 1, "published": 0}
    assert door.drain(name, readers) == []
    assert dead(door, readers) == [1, 2, 3]


@pytest.mark.parametrize("dispatched", [True, False])
def test_a_given_up_message_group_stays_so_across_a_restart(
    door: Door, condemn: Condemn, messages: Make, dispatched: bool
) -> None:
    name, readers = condemn(2)
    if dispatched:
        door.sql("FROM quarantined_groups")

    door.reopen()

    door.broker.send(name, messages(2, start=2, groups=["a"]))
    assert door.drain(name, readers) == [b"1"]
    assert dead(door, readers) == [0, 2, 3]
    door.broker.unpark(readers)
    door.sql("FROM quarantined_groups")
    door.reopen()
    door.broker.send(name, messages(1, start=4, groups=["a"]))
    assert door.drain(name, readers) == [b"4"]


def test_a_reset_clears_what_is_given_up(door: Door, condemn: Condemn) -> None:
    name, readers = condemn()
    door.drain(name, readers)

    door.broker.reset_offset(readers, name, to_offset=2)

    assert door.sql("FROM quarantined_groups") == []
    assert door.drain(name, readers) == [b"2", b"3", b"4", b"5", b"6", b"7"]


def test_deleting_the_topic_or_the_group_clears_what_is_given_up(
    door: Door, condemn: Condemn
) -> None:
    name, _ = condemn()
    _, readers = condemn()

    door.broker.delete_topic(name)
    door.broker.delete_group(readers)

    assert door.sql("FROM quarantined_groups") == []
