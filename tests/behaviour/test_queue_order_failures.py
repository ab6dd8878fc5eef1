"""Order by queue when messages fail: delays of their own, dead letters, parking, redrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline import errors
from tests.behaviour.received import attempts, bodies
from tests.behaviour.redrives import redrive

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make

MINUTE = 60_000
BACKOFF_MS = 20_000


@pytest.fixture
def door(shared_door: Door) -> Door:
    return shared_door


@pytest.fixture
def line(door: Door, topic: Make, messages: Make) -> str:
    """Six messages in one queue."""
    name = str(topic(queues=1))
    door.broker.send(name, messages(6))
    return name


@pytest.fixture
def readers(group: Make) -> str:
    return str(group(order="queue", max_attempts=3, backoff_ms=[BACKOFF_MS]))


@pytest.fixture
def parking(group: Make) -> str:
    return str(group(order="queue", max_attempts=1, on_failure="park"))


def test_each_failure_waits_for_its_own_time_and_the_last_one_opens_the_queue(
    door: Door, line: str, readers: str, outcomes: Make
) -> None:
    got = door.broker.receive(readers, line, limit=3)
    door.broker.settle(readers, outcomes(got.take([0]), "retry", retry_after_ms=10_000))
    door.broker.settle(readers, outcomes(got.take([1]), "retry"))
    door.broker.ack(got.take([2]))
    door.advance(BACKOFF_MS - 1)
    blocked = door.broker.receive(readers, line)
    door.advance(1)

    again = door.broker.receive(readers, line, limit=3)

    assert blocked.num_rows == 0
    assert (bodies(again), attempts(again)) == ([b"0", b"1", b"2"], [2, 2, 2])


def test_a_failure_leaves_the_rest_of_the_batch_with_its_receiver(
    door: Door, line: str, readers: str, outcomes: Make
) -> None:
    got = door.broker.receive(readers, line, limit=3)
    door.broker.settle(readers, outcomes(got.take([0]), "retry", retry_after_ms=0))
    blocked = door.broker.receive(readers, line)

    door.broker.ack(got.take([1, 2]))
    again = door.broker.receive(readers, line, limit=3)

    assert blocked.num_rows == 0
    assert (bodies(again), attempts(again)) == ([b"0", b"1", b"2"], [2, 2, 2])


def test_a_poisoned_message_goes_to_the_dead_letters_and_the_queue_goes_on(
    door: Door, line: str, readers: str
) -> None:
    seen = []
    for _ in range(3):
        got = door.broker.receive(readers, line, limit=3, invisible_duration_ms=MINUTE)
        seen.append((bodies(got), attempts(got)))
        door.advance(MINUTE)

    rest = door.broker.receive(readers, line, limit=3)

    assert seen == [([b"0", b"1", b"2"], [n] * 3) for n in (1, 2, 3)]
    assert door.bodies(f"%DLQ%{readers}") == [b"0"]
    assert (bodies(rest), attempts(rest)) == ([b"1", b"2", b"3"], [1, 1, 1])


def test_what_was_acked_behind_a_poisoned_message_is_done_when_that_one_is_dead(
    door: Door, line: str, readers: str
) -> None:
    for _ in range(3):
        got = door.broker.receive(readers, line, limit=3, invisible_duration_ms=MINUTE)
        door.broker.ack(got.take([1, 2]))
        door.advance(MINUTE)

    rest = door.broker.receive(readers, line)

    assert door.bodies(f"%DLQ%{readers}") == [b"0"]
    assert (bodies(rest), attempts(rest)) == ([b"3", b"4", b"5"], [1, 1, 1])


def test_what_was_acked_is_no_failure_when_a_shorter_batch_makes_it_come_again(
    door: Door, line: str, readers: str
) -> None:
    for _ in range(3):
        got = door.broker.receive(readers, line, limit=3, invisible_duration_ms=MINUTE)
        door.broker.ack(got.take([2]))
        door.advance(MINUTE)
    door.broker.ack(door.broker.receive(readers, line, limit=1))

    again = door.broker.receive(readers, line, limit=1)

    assert door.bodies(f"%DLQ%{readers}") == [b"0"]
    assert (bodies(again), attempts(again)) == ([b"2"], [3])


def test_what_was_acked_and_is_given_back_is_no_failure(door: Door, line: str, group: Make) -> None:
    once = group(order="queue", max_attempts=1)
    got = door.broker.receive(once, line, limit=3)
    door.broker.ack(got.take([1]))
    door.broker.release(got.take([0, 2]))
    door.broker.release(door.broker.receive(once, line, limit=3))
    door.broker.ack(door.broker.receive(once, line, limit=1))

    again = door.broker.receive(once, line, limit=3)

    assert door.bodies(f"%DLQ%{once}") == []
    assert (bodies(again), attempts(again)) == ([b"1", b"2", b"3"], [1, 1, 1])


def test_revive_buries_a_poisoned_message_too(door: Door, line: str, readers: str) -> None:
    for _ in range(3):
        door.broker.receive(readers, line, limit=3, invisible_duration_ms=MINUTE)
        door.advance(MINUTE)
        door.broker.revive()

    rest = door.broker.receive(readers, line, limit=3)

    assert door.bodies(f"%DLQ%{readers}") == [b"0"]
    assert (bodies(rest), attempts(rest)) == ([b"1", b"2", b"3"], [1, 1, 1])


def test_revive_opens_no_queue_early(door: Door, line: str, readers: str) -> None:
    got = door.broker.receive(readers, line, limit=2, invisible_duration_ms=MINUTE)
    door.broker.change_invisible_duration(got.take([0]), 1_000)
    door.advance(1_000)

    door.broker.revive()

    assert door.broker.receive(readers, line).num_rows == 0
    door.broker.ack(got.take([1]))
    again = door.broker.receive(readers, line, limit=2)
    assert (bodies(again), attempts(again)) == ([b"0", b"1"], [2, 2])


def test_the_last_failure_said_of_several_buries_the_first_and_spares_the_others(
    door: Door, line: str, readers: str, outcomes: Make
) -> None:
    answer = {}
    for _ in range(3):
        got = door.broker.receive(readers, line, limit=3)
        failed = outcomes(got.take([0, 1]), "retry", retry_after_ms=0)
        answer = door.broker.settle(readers, failed)
        door.broker.change_invisible_duration(got.take([2]), 1)
        door.advance(1)

    rest = door.broker.receive(readers, line, limit=3)

    assert (answer["retried"], answer["dead_lettered"]) == (1, 1)
    assert door.bodies(f"%DLQ%{readers}") == [b"0"]
    assert bodies(rest) == [b"1", b"2", b"3"]
    assert attempts(rest) == [1, 2, 1]


def test_each_message_that_is_given_up_is_given_up(
    door: Door, line: str, readers: str, outcomes: Make
) -> None:
    got = door.broker.receive(readers, line, limit=3)
    said = [(0, "give_up"), (1, "retry"), (2, "give_up")]
    given_up = pa.concat_tables([outcomes(got.take([row]), outcome) for row, outcome in said])

    answer = door.broker.settle(readers, given_up)
    door.advance(BACKOFF_MS)

    assert (answer["retried"], answer["dead_lettered"]) == (1, 2)
    assert sorted(door.bodies(f"%DLQ%{readers}")) == [b"0", b"2"]
    assert bodies(door.broker.receive(readers, line)) == [b"1", b"3", b"4", b"5"]


def test_a_receipt_behind_a_dead_message_stays_good(
    door: Door, line: str, readers: str, outcomes: Make
) -> None:
    got = door.broker.receive(readers, line, limit=3)
    door.broker.settle(readers, outcomes(got.take([0]), "dead_letter", reason="boom"))
    blocked = door.broker.receive(readers, line)

    door.broker.ack(got.take([1, 2]))

    assert door.bodies(f"%DLQ%{readers}") == [b"0"]
    assert blocked.num_rows == 0
    assert bodies(door.broker.receive(readers, line)) == [b"3", b"4", b"5"]


def test_a_batch_may_be_forwarded_to_the_dead_letters_one_by_one(
    door: Door, line: str, readers: str
) -> None:
    got = door.broker.receive(readers, line, limit=3)
    door.broker.ack(got.take([2]))
    for row in (1, 0):
        door.broker.forward_to_dead_letter_queue(got.take([row]))

    rest = door.broker.receive(readers, line)

    assert sorted(door.bodies(f"%DLQ%{readers}")) == [b"0", b"1"]
    assert bodies(rest) == [b"3", b"4", b"5"]


def test_a_parked_message_holds_the_whole_queue_until_it_is_unparked(
    door: Door, line: str, parking: str, fail: Make
) -> None:
    got = door.broker.receive(parking, line, limit=3)
    fail(parking, got.take([1]), reason="no engine")
    door.broker.ack(got.take([0, 2]))
    door.advance(12 * 60 * MINUTE)
    door.broker.revive()
    held = door.broker.receive(parking, line)
    parked = f"SELECT queue_offset, waiting, reason FROM parked WHERE consumer_group = '{parking}'"
    told = door.sql(parked)
    facts = door.broker.due()["groups"][parking]["topics"][line]

    answer = door.broker.unpark(parking)

    assert held.num_rows == 0
    assert told == [{"queue_offset": 1, "waiting": 3, "reason": "no engine"}]
    assert (facts["ready"], facts["parked"], facts["next_visible_ms"]) == (0, 1, None)
    assert answer["unparked"] == 1
    again = door.broker.receive(parking, line)
    assert (bodies(again), attempts(again)) == (
        [b"1", b"2", b"3", b"4", b"5"],
        [1, 1, 1, 1, 1],
    )


def test_each_parked_message_of_a_queue_keeps_its_own_failure(
    door: Door, line: str, parking: str, fail: Make
) -> None:
    got = door.broker.receive(parking, line, limit=3)
    fail(parking, got.take([1]), reason="no engine")
    first_ms = door.clock.now_ms()
    door.advance(5)
    fail(parking, got.take([0]), reason="no wings")
    columns = "queue_offset, delivery_attempts, parked_at_ms, reason"

    told = door.sql(
        f"SELECT {columns} FROM parked WHERE consumer_group = '{parking}' ORDER BY queue_offset"
    )

    assert [tuple(row.values()) for row in told] == [
        (0, 1, first_ms + 5, "no wings"),
        (1, 1, first_ms, "no engine"),
    ]


def test_a_parked_message_may_be_skipped(door: Door, line: str, parking: str, fail: Make) -> None:
    got = door.broker.receive(parking, line, limit=3)
    fail(parking, got.take([0]))
    door.broker.ack(got.take([1]))

    answer = door.broker.unpark(parking, skip=True)
    blocked = door.broker.receive(parking, line)
    door.broker.ack(got.take([2]))

    assert answer["skipped"] == 1
    assert door.bodies(f"%DLQ%{parking}") == [b"0"]
    assert blocked.num_rows == 0
    assert bodies(door.broker.receive(parking, line)) == [b"3", b"4", b"5"]


def test_a_redriven_message_comes_first_when_the_batch_is_over(
    door: Door, line: str, readers: str
) -> None:
    door.broker.forward_to_dead_letter_queue(door.broker.receive(readers, line, limit=1))
    held = door.broker.receive(readers, line, limit=1)

    assert redrive(door, readers, 0) == ["redriven"]
    meanwhile = door.broker.receive(readers, line)
    door.broker.ack(held)
    got = door.broker.receive(readers, line)

    assert bodies(held) == [b"1"]
    assert meanwhile.num_rows == 0
    assert bodies(got) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert attempts(got) == [1, 2, 1, 1, 1, 1]
    with pytest.raises(errors.ReceiptHandleError):
        door.broker.ack(held)


def test_what_was_acked_behind_a_gap_may_be_redriven(door: Door, line: str, readers: str) -> None:
    for _ in range(2):  # it dies twice: the second letter is opened while it is acked, but waits
        door.broker.forward_to_dead_letter_queue(door.broker.receive(readers, line, limit=1))
        redrive(door, readers, door.stored(f"%DLQ%{readers}") - 1)
    letters = door.bodies(f"%DLQ%{readers}")
    got: pa.Table = door.broker.receive(readers, line, limit=2)
    door.broker.ack(got)

    assert letters == [b"0", b"0"]
    assert bodies(got) == [b"0", b"1"]
    assert door.drain(line, readers) == [b"2", b"3", b"4", b"5"]
