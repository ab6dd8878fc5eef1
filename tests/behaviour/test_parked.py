"""A group that parks holds an exhausted message, and those behind it, until it is unparked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline import errors, limits

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

MINUTE = 60_000
Poison = Callable[..., tuple[str, str]]
SAID = {"reason": "no engine", "error_type": "EngineError", "run_id": "run-1"}


def named(*groups: str) -> pa.Table:
    return pa.table({"message_group": pa.array(groups, pa.string())})


def bodies(table: pa.Table) -> list[bytes]:
    found: list[bytes] = table["body"].to_pylist()
    return found


@pytest.fixture
def poison(endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make) -> Poison:
    """``poison(n)``: n messages of groups a and b in turn, the first one parked; topic, group."""

    def make(n: int = 8, **settings: object) -> tuple[str, str]:
        how = {"order": "message_group", "max_attempts": 1, "on_failure": "park", **settings}
        name, readers = topic(type="fifo", queues=1), group(**how)
        endpoint.broker.send(name, messages(n, groups=["a", "b"]))
        first = endpoint.broker.receive(readers, name, limit=1)
        assert bodies(first) == [b"0"]
        fail(readers, first, **SAID)
        return name, readers

    return make


@pytest.mark.every_endpoint
def test_the_last_failure_parks_the_message_and_all_that_follows_it(
    endpoint: Endpoint, poison: Poison
) -> None:
    name, readers = poison()

    assert endpoint.drain(name, readers) == [b"1", b"3", b"5", b"7"]
    endpoint.advance(limits.INVISIBLE_MAX_MS)
    endpoint.broker.revive()
    assert endpoint.broker.receive(readers, name).num_rows == 0
    assert endpoint.stored(f"%DLQ%{readers}") == 0


def test_a_message_parks_after_its_last_attempt_and_not_before(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(order="message_group", max_attempts=3, on_failure="park")
    endpoint.broker.send(name, messages(1, groups=["a"]))

    answers = []
    for attempt in (1, 2, 3):
        got = endpoint.broker.receive(readers, name)
        assert got["delivery_attempt"].to_pylist() == [attempt]
        answers.append(fail(readers, got, retry_after_ms=0))

    assert answers[-1] == {
        "acked": 0,
        "retried": 0,
        "dead_lettered": 0,
        "parked": 1,
        "published": 0,
    }
    assert endpoint.broker.receive(readers, name).num_rows == 0


def test_the_last_ended_lease_parks_the_message(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(order="message_group", max_attempts=2, on_failure="park")
    endpoint.broker.send(name, messages(4, groups=["a"]))
    for _ in range(2):
        assert endpoint.broker.receive(readers, name, invisible_duration_ms=1_000).num_rows == 4
        endpoint.advance(1_000)

    report = endpoint.broker.revive()
    again = endpoint.broker.receive(readers, name)

    assert (report["parked"], report["dead_lettered"], again.num_rows) == (1, 0, 0)
    [parked] = endpoint.sql("SELECT queue_offset, waiting, reason FROM parked")
    assert parked == {"queue_offset": 0, "waiting": 3, "reason": "no attempt left"}
    assert endpoint.broker.unpark(readers)["unparked"] == 1
    got = endpoint.broker.receive(readers, name)
    assert bodies(got) == [b"0", b"1", b"2", b"3"]
    # Those behind were only waiting: nothing of it is their fault.
    assert got["delivery_attempt"].to_pylist() == [1, 1, 1, 1]


def test_unpark_delivers_the_failed_message_first_and_counts_from_one_again(
    endpoint: Endpoint, poison: Poison
) -> None:
    name, readers = poison(max_attempts=1)
    endpoint.drain(name, readers)

    assert endpoint.broker.unpark(readers) == {
        "unparked": 1,
        "skipped": 0,
        "lifted": 0,
        "pardoned": 0,
    }

    got = endpoint.broker.receive(readers, name)
    assert bodies(got)[0] == b"0"
    assert got["delivery_attempt"].to_pylist() == [1] * got.num_rows
    endpoint.broker.ack(got)
    assert bodies(got) + endpoint.drain(name, readers) == [b"0", b"2", b"4", b"6"]


def test_what_was_delivered_with_the_failed_message_is_held_and_its_receipts_are_void(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(order="message_group", max_attempts=1, on_failure="park")
    endpoint.broker.send(name, messages(4, groups=["a"]))
    got = endpoint.broker.receive(readers, name)
    endpoint.broker.ack(got.slice(0, 1))
    fail(readers, got.slice(1, 1))

    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(got.slice(2, 1))

    assert endpoint.broker.receive(readers, name).num_rows == 0
    endpoint.broker.unpark(readers)
    again = endpoint.broker.receive(readers, name)
    assert bodies(again) == [b"1", b"2", b"3"]
    assert again["delivery_attempt"].to_pylist() == [1, 1, 1]


def test_skip_sends_the_failed_message_to_the_dead_letters_and_goes_on_behind_it(
    endpoint: Endpoint, poison: Poison
) -> None:
    name, readers = poison()
    endpoint.drain(name, readers)

    assert endpoint.broker.unpark(readers, skip=True) == {
        "unparked": 0,
        "skipped": 1,
        "lifted": 0,
        "pardoned": 0,
    }

    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0"]
    query = "SELECT reason, error_type, run_id FROM dead_letters WHERE consumer_group = '{}'"
    assert endpoint.sql(query.format(readers)) == [SAID]
    assert endpoint.drain(name, readers) == [b"2", b"4", b"6"]


def test_unparking_one_message_group_leaves_the_others_parked(
    endpoint: Endpoint, poison: Poison, fail: Make
) -> None:
    name, readers = poison()
    fail(readers, endpoint.broker.receive(readers, name, limit=1))

    answer = endpoint.broker.unpark(readers, message_groups=named("b", "no such group"))

    assert answer["unparked"] == 1
    assert endpoint.drain(name, readers) == [b"1", b"3", b"5", b"7"]
    assert [row["message_group"] for row in endpoint.sql("FROM parked")] == ["a"]


def test_unparking_one_topic_leaves_the_others_parked(
    endpoint: Endpoint, poison: Poison, topic: Make, messages: Make, fail: Make
) -> None:
    name, readers = poison()
    other = topic(type="fifo", queues=1)
    endpoint.broker.send(other, messages(2, groups=["a"]))
    fail(readers, endpoint.broker.receive(readers, other, limit=1))

    assert endpoint.broker.unpark(readers, topic=other)["unparked"] == 1

    assert endpoint.drain(other, readers) == [b"0", b"1"]
    assert [row["topic"] for row in endpoint.sql("FROM parked")] == [name]


def test_what_arrives_for_a_parked_message_group_waits_behind_it(
    endpoint: Endpoint, poison: Poison, messages: Make
) -> None:
    name, readers = poison(4)
    endpoint.drain(name, readers)
    endpoint.broker.send(name, messages(2_000, start=4, groups=["a", "b"]))
    assert [int(b) % 2 for b in endpoint.drain(name, readers, limit=300)] == [1] * 1_000

    endpoint.broker.unpark(readers)

    assert [int(b) for b in endpoint.drain(name, readers, limit=300)] == list(range(0, 2_004, 2))


def test_without_order_only_the_message_is_parked(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(max_attempts=1, on_failure="park")
    endpoint.broker.send(name, messages(3))
    fail(readers, endpoint.broker.receive(readers, name, limit=1))

    assert endpoint.drain(name, readers) == [b"1", b"2"]
    assert [row["waiting"] for row in endpoint.sql("FROM parked")] == [0]
    assert endpoint.broker.unpark(readers)["unparked"] == 1
    assert endpoint.drain(name, readers) == [b"0"]


def test_a_message_without_a_group_is_parked_alone(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name = topic(queues=1)
    readers = group(order="message_group", max_attempts=1, on_failure="park")
    endpoint.broker.send(name, messages(3))
    fail(readers, endpoint.broker.receive(readers, name, limit=1))

    assert endpoint.drain(name, readers) == [b"1", b"2"]
    assert endpoint.broker.unpark(readers, message_groups=named("x"))["unparked"] == 0
    assert endpoint.broker.unpark(readers)["unparked"] == 1


def test_nothing_parked_is_nothing_to_unpark(endpoint: Endpoint, group: Make) -> None:
    readers = group(on_failure="park")

    for skip in (False, True):
        answer = endpoint.broker.unpark(readers, skip=skip)
        assert answer == {"unparked": 0, "skipped": 0, "lifted": 0, "pardoned": 0}


def test_unpark_of_what_does_not_exist_is_refused(
    endpoint: Endpoint, group: Make, unused: str
) -> None:
    readers = group()

    with pytest.raises(errors.ConsumerGroupNotFoundError):
        endpoint.broker.unpark(unused)
    with pytest.raises(errors.TopicNotFoundError):
        endpoint.broker.unpark(readers, topic=unused)
    with pytest.raises(errors.TableSchemaError):
        endpoint.broker.unpark(readers, message_groups=pa.table({"group": ["a"]}))


def test_a_consumer_may_still_send_a_rejected_message_to_the_dead_letters(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, outcomes: Make
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(order="message_group", on_failure="park")
    endpoint.broker.send(name, messages(2, groups=["a"]))
    got = endpoint.broker.receive(readers, name, limit=1)

    answer = endpoint.broker.settle(readers, outcomes(got, "dead_letter", reason="unreadable"))

    assert (answer["dead_lettered"], endpoint.bodies(f"%DLQ%{readers}")) == (1, [b"0"])
    assert endpoint.drain(name, readers) == [b"1"]


def test_an_earlier_message_of_the_delivery_may_still_be_settled(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name = topic(type="fifo", queues=1)
    readers = group(order="message_group", max_attempts=1, on_failure="park")
    endpoint.broker.send(name, messages(3, groups=["a"]))
    got = endpoint.broker.receive(readers, name)
    fail(readers, got.slice(1, 1))

    fail(readers, got.slice(0, 1))

    assert len(endpoint.sql("FROM parked")) == 2
    assert endpoint.broker.unpark(readers)["unparked"] == 2
    assert endpoint.drain(name, readers) == [b"0", b"1", b"2"]


# ------------------------------------------------------------------------------------ what is seen


def test_parked_messages_are_seen_with_why_and_how_many_wait(
    endpoint: Endpoint, poison: Poison
) -> None:
    name, readers = poison()
    endpoint.drain(name, readers)

    [row] = endpoint.sql("FROM parked")

    sent = endpoint.broker.read(name, 0, offset=0, limit=1)["message_id"][0].as_py()
    signature = row.pop("signature")
    assert len(signature) == 12
    assert row == {
        "consumer_group": readers,
        "topic": name,
        "queue_id": 0,
        "queue_offset": 0,
        "message_id": sent,
        "message_group": "a",
        "delivery_attempts": 1,
        "parked_at_ms": endpoint.clock.now_ms(),
        "waiting": 3,
        **SAID,
    }
    assert endpoint.sql("FROM retrying") == []


def test_parked_messages_count_as_lag(endpoint: Endpoint, poison: Poison) -> None:
    name, readers = poison()
    endpoint.drain(name, readers)

    [lag] = endpoint.sql("SELECT lag FROM lag")
    [progress] = endpoint.sql("SELECT committed_offset, in_flight, retrying, parked FROM progress")

    assert lag["lag"] == 4
    assert progress == {"committed_offset": 0, "in_flight": 0, "retrying": 0, "parked": 1}


def test_parked_messages_are_no_work_that_is_due(endpoint: Endpoint, poison: Poison) -> None:
    name, readers = poison()
    endpoint.drain(name, readers)
    endpoint.advance(limits.INVISIBLE_MAX_MS)

    due = endpoint.broker.due()

    facts = due["groups"][readers]["topics"][name]
    assert (facts["ready"], facts["unsettled"], facts["parked"]) == (0, 0, 1)
    assert facts["next_visible_ms"] is None
    revive = due["jobs"]["revive"]
    assert (revive["due"], revive["next_due_ms"]) == (0, None)


def test_unpark_wakes_a_receiver_that_waits(endpoint: Endpoint, poison: Poison) -> None:
    name, readers = poison(1)
    waiting = endpoint.begin(lambda: endpoint.broker.receive(readers, name, wait_ms=MINUTE))

    endpoint.broker.unpark(readers)

    assert bodies(waiting.result(60)) == [b"0"]


def test_a_group_altered_to_park_parks_from_then_on(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order="message_group", max_attempts=1)
    endpoint.broker.send(name, messages(2, groups=["a"]))
    fail(readers, endpoint.broker.receive(readers, name, limit=1))

    endpoint.broker.alter_group(readers, on_failure="park")
    fail(readers, endpoint.broker.receive(readers, name, limit=1))
    endpoint.broker.alter_group(readers, on_failure="dead_letter")

    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0"]
    assert len(endpoint.sql("FROM parked")) == 1


# --------------------------------------------------------------------------- restart, reset, delete


@pytest.mark.parametrize("dispatched", [True, False])
def test_parked_messages_are_there_after_a_restart(
    endpoint: Endpoint, poison: Poison, dispatched: bool
) -> None:
    name, readers = poison(2_100)
    endpoint.drain(name, readers)
    before = endpoint.sql("FROM parked") if dispatched else None

    endpoint.reopen()

    assert endpoint.drain(name, readers) == []
    assert before is None or endpoint.sql("FROM parked") == before
    endpoint.broker.unpark(readers)
    assert [int(b) for b in endpoint.drain(name, readers)] == list(range(0, 2_100, 2))


def test_a_reset_clears_what_is_parked(endpoint: Endpoint, poison: Poison) -> None:
    name, readers = poison()
    endpoint.drain(name, readers)

    endpoint.broker.reset_offset(readers, name, to_offset=2)

    assert endpoint.sql("FROM parked") == []
    assert endpoint.drain(name, readers) == [b"2", b"3", b"4", b"5", b"6", b"7"]


def test_deleting_the_topic_or_the_group_clears_what_is_parked(
    endpoint: Endpoint, poison: Poison
) -> None:
    name, _ = poison()
    _, readers = poison()

    endpoint.broker.delete_topic(name)
    endpoint.broker.delete_group(readers)

    assert endpoint.sql("FROM parked") == []
