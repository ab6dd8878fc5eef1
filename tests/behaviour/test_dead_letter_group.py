"""With dead_letter_group a final failure quarantines its message group until the lift."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

SAID = {"reason": "no engine", "error_type": "EngineError", "run_id": "run-1"}
Condemn = Callable[..., tuple[str, str]]


def dead(endpoint: Endpoint, group: str) -> list[int]:
    return [int(body) for body in endpoint.bodies(f"%DLQ%{group}")]


@pytest.fixture
def condemn(endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make) -> Condemn:
    """``condemn(n)``: n messages of the groups a and b in turn, a given up with its first one."""

    def make(n: int = 8, limit: int = 1) -> tuple[str, str]:
        name = topic(type="fifo", queues=1)
        readers = group(order="message_group", max_attempts=1, on_failure="dead_letter_group")
        endpoint.broker.send(name, messages(n, groups=["a", "b"]))
        got = endpoint.broker.receive(readers, name, limit=limit)
        fail(readers, got.slice(0, 1), **SAID)
        return name, readers

    return make


@pytest.mark.every_endpoint
def test_what_follows_the_failed_message_goes_to_the_dead_letters_in_order(
    endpoint: Endpoint, condemn: Condemn
) -> None:
    name, readers = condemn()

    assert endpoint.drain(name, readers) == [b"1", b"3", b"5", b"7"]
    assert dead(endpoint, readers) == [0, 2, 4, 6]


def test_what_was_delivered_with_it_goes_too(endpoint: Endpoint, condemn: Condemn) -> None:
    _, readers = condemn(limit=6)

    assert dead(endpoint, readers) == [0, 2, 4]
    rows = endpoint.sql("SELECT attempts FROM dead_letters ORDER BY queue_offset")
    assert [row["attempts"] for row in rows] == [1, 0, 0]


def test_what_comes_later_goes_too(endpoint: Endpoint, condemn: Condemn, messages: Make) -> None:
    name, readers = condemn(2)
    endpoint.drain(name, readers)
    endpoint.broker.send(name, messages(3_000, start=2, groups=["a", "b"]))

    assert [int(b) % 2 for b in endpoint.drain(name, readers, limit=200)] == [1] * 1_500
    assert dead(endpoint, readers) == list(range(0, 3_002, 2))


def test_what_waited_behind_the_cursor_goes_too(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(order="message_group", max_attempts=1, on_failure="dead_letter_group")
    endpoint.broker.send(name, messages(5_000, groups=["a", "b"]))
    first = endpoint.broker.receive(readers, name, limit=1)
    endpoint.drain(name, readers, limit=500)

    fail(readers, first)

    assert endpoint.drain(name, readers) == []
    assert dead(endpoint, readers) == list(range(0, 5_000, 2))


@pytest.mark.parametrize("pardoned", [False, True])
def test_what_follows_is_copied_when_nothing_before_it_is_with_a_receiver_any_more(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, outcomes: Make, pardoned: bool
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(order="message_group", on_failure="dead_letter_group")
    endpoint.broker.send(name, messages(4, groups=["a"]))
    got = endpoint.broker.receive(readers, name, limit=2)
    endpoint.broker.settle(readers, outcomes(got.slice(1), "dead_letter"))

    assert endpoint.drain(name, readers) == []
    before = dead(endpoint, readers)
    if pardoned:
        assert endpoint.broker.unpark(readers)["lifted"] == 1
    endpoint.broker.ack(got.slice(0, 1))
    after = endpoint.drain(name, readers)

    assert before == [1]
    assert after == ([b"2", b"3"] if pardoned else [])
    assert dead(endpoint, readers) == ([1] if pardoned else [1, 2, 3])


def test_the_last_ended_lease_gives_the_message_group_up(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(order="message_group", max_attempts=1, on_failure="dead_letter_group")
    endpoint.broker.send(name, messages(4, groups=["a"]))
    endpoint.broker.receive(readers, name, limit=2, invisible_duration_ms=1_000)
    endpoint.advance(1_000)

    endpoint.broker.revive()

    assert endpoint.drain(name, readers) == []
    assert dead(endpoint, readers) == [0, 1, 2, 3]


def test_those_that_follow_say_for_which_failure_they_went(
    endpoint: Endpoint, condemn: Condemn
) -> None:
    name, readers = condemn()
    endpoint.drain(name, readers)

    rows = endpoint.sql(
        "SELECT reason, error_type, run_id, signature FROM dead_letters ORDER BY queue_offset"
    )

    follow = {**SAID, "reason": "an earlier message of its group failed: no engine"}
    signatures = {row.pop("signature") for row in rows}
    assert rows == [SAID, follow, follow, follow]
    assert len(signatures) == 1


def test_a_quarantine_is_shown(endpoint: Endpoint, condemn: Condemn) -> None:
    name, readers = condemn()

    [row] = endpoint.sql(
        "SELECT consumer_group, topic, message_group, queue_offset, reason FROM quarantined_groups"
    )

    assert row == {
        "consumer_group": readers,
        "topic": name,
        "message_group": "a",
        "queue_offset": 0,
        "reason": "no engine",
    }


def test_the_view_has_its_earlier_name_for_one_release(
    endpoint: Endpoint, condemn: Condemn
) -> None:
    _, readers = condemn()

    now = endpoint.sql(
        "SELECT * EXCLUDE quarantined_at_ms, quarantined_at_ms FROM quarantined_groups"
    )
    before = endpoint.sql("SELECT * EXCLUDE condemned_at_ms, condemned_at_ms FROM condemned")

    assert [tuple(row.values()) for row in now] == [tuple(row.values()) for row in before]
    assert [row["consumer_group"] for row in now] == [readers]


def test_a_message_group_whose_quarantine_is_lifted_is_delivered_again(
    endpoint: Endpoint, condemn: Condemn, messages: Make
) -> None:
    name, readers = condemn(4)
    endpoint.drain(name, readers)

    groups = pa.table({"message_group": ["a"]})
    answer = endpoint.broker.unpark(readers, message_groups=groups)

    assert answer == {"unparked": 0, "skipped": 0, "lifted": 1, "pardoned": 1}
    endpoint.broker.send(name, messages(2, start=4, groups=["a"]))
    assert endpoint.drain(name, readers) == [b"4", b"5"]
    assert dead(endpoint, readers) == [0, 2]


def test_only_messages_that_match_the_tag_are_dead_lettered(
    endpoint: Endpoint, condemn: Condemn, messages: Make
) -> None:
    name, readers = condemn(2)
    endpoint.broker.send(name, messages(4, start=2, groups=["a"], tag=["x", "y", "x", "y"]))

    while (got := endpoint.broker.receive(readers, name, filter="x")).num_rows:
        endpoint.broker.ack(got)

    assert dead(endpoint, readers) == [0, 2, 4]


def test_without_order_the_message_goes_alone(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(max_attempts=1, on_failure="dead_letter_group")
    endpoint.broker.send(name, messages(3))
    fail(readers, endpoint.broker.receive(readers, name, limit=1))

    assert endpoint.drain(name, readers) == [b"1", b"2"]
    assert dead(endpoint, readers) == [0]


def test_a_message_that_the_consumer_rejects_quarantines_its_group(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, outcomes: Make
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(order="message_group", on_failure="dead_letter_group")
    endpoint.broker.send(name, messages(4, groups=["a"]))
    got = endpoint.broker.receive(readers, name, limit=3)

    settled = outcomes(got, ["ack", "dead_letter", "retry"])
    answer = endpoint.broker.settle(readers, settled)

    assert answer == {"acked": 1, "retried": 0, "dead_lettered": 1, "published": 0}
    assert endpoint.drain(name, readers) == []
    assert dead(endpoint, readers) == [1, 2, 3]


@pytest.mark.parametrize("dispatched", [True, False])
def test_a_quarantined_message_group_stays_so_across_a_restart(
    endpoint: Endpoint, condemn: Condemn, messages: Make, dispatched: bool
) -> None:
    name, readers = condemn(2)
    if dispatched:
        endpoint.sql("FROM quarantined_groups")

    endpoint.reopen()

    endpoint.broker.send(name, messages(2, start=2, groups=["a"]))
    assert endpoint.drain(name, readers) == [b"1"]
    assert dead(endpoint, readers) == [0, 2, 3]
    endpoint.broker.unpark(readers)
    endpoint.sql("FROM quarantined_groups")
    endpoint.reopen()
    endpoint.broker.send(name, messages(1, start=4, groups=["a"]))
    assert endpoint.drain(name, readers) == [b"4"]


def test_a_reset_lifts_the_quarantine(endpoint: Endpoint, condemn: Condemn) -> None:
    name, readers = condemn()
    endpoint.drain(name, readers)

    endpoint.broker.reset_offset(readers, name, to_offset=2)

    assert endpoint.sql("FROM quarantined_groups") == []
    assert endpoint.drain(name, readers) == [b"2", b"3", b"4", b"5", b"6", b"7"]


def test_deleting_the_topic_or_the_group_lifts_the_quarantine(
    endpoint: Endpoint, condemn: Condemn
) -> None:
    name, _ = condemn()
    _, readers = condemn()

    endpoint.broker.delete_topic(name)
    endpoint.broker.delete_group(readers)

    assert endpoint.sql("FROM quarantined_groups") == []
