"""Order by queue when messages fail: delays of their own, dead letters, parking, redrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline import errors
from tests.behaviour.received import attempts, bodies
from tests.behaviour.redrives import redrive

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

MINUTE = 60_000
BACKOFF_MS = 20_000


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


@pytest.fixture
def line(endpoint: Endpoint, topic: Make, messages: Make) -> str:
    """Six messages in one queue."""
    name = str(topic(queues=1))
    endpoint.broker.send(name, messages(6))
    return name


@pytest.fixture
def readers(group: Make) -> str:
    return str(group(order="queue", max_attempts=3, backoff_ms=[BACKOFF_MS]))


@pytest.fixture
def parking(group: Make) -> str:
    return str(group(order="queue", max_attempts=1, on_failure="park"))


def test_each_failure_waits_for_its_own_time_and_the_last_one_opens_the_queue(
    endpoint: Endpoint, line: str, readers: str, outcomes: Make
) -> None:
    got = endpoint.broker.receive(readers, line, limit=3)
    endpoint.broker.settle(readers, outcomes(got.take([0]), "retry", retry_after_ms=10_000))
    endpoint.broker.settle(readers, outcomes(got.take([1]), "retry"))
    endpoint.broker.ack(got.take([2]))
    endpoint.advance(BACKOFF_MS - 1)
    blocked = endpoint.broker.receive(readers, line)
    endpoint.advance(1)

    again = endpoint.broker.receive(readers, line, limit=3)

    assert blocked.num_rows == 0
    assert (bodies(again), attempts(again)) == ([b"0", b"1", b"2"], [2, 2, 2])


def test_a_failure_leaves_the_rest_of_the_batch_with_its_receiver(
    endpoint: Endpoint, line: str, readers: str, outcomes: Make
) -> None:
    got = endpoint.broker.receive(readers, line, limit=3)
    endpoint.broker.settle(readers, outcomes(got.take([0]), "retry", retry_after_ms=0))
    blocked = endpoint.broker.receive(readers, line)

    endpoint.broker.ack(got.take([1, 2]))
    again = endpoint.broker.receive(readers, line, limit=3)

    assert blocked.num_rows == 0
    assert (bodies(again), attempts(again)) == ([b"0", b"1", b"2"], [2, 2, 2])


def test_a_poisoned_message_goes_to_the_dead_letters_and_the_queue_goes_on(
    endpoint: Endpoint, line: str, readers: str
) -> None:
    seen = []
    for _ in range(3):
        got = endpoint.broker.receive(readers, line, limit=3, invisible_duration_ms=MINUTE)
        seen.append((bodies(got), attempts(got)))
        endpoint.advance(MINUTE)

    rest = endpoint.broker.receive(readers, line, limit=3)

    assert seen == [([b"0", b"1", b"2"], [n] * 3) for n in (1, 2, 3)]
    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0"]
    assert (bodies(rest), attempts(rest)) == ([b"1", b"2", b"3"], [1, 1, 1])


def test_what_was_acked_behind_a_poisoned_message_is_done_when_that_one_is_dead(
    endpoint: Endpoint, line: str, readers: str
) -> None:
    for _ in range(3):
        got = endpoint.broker.receive(readers, line, limit=3, invisible_duration_ms=MINUTE)
        endpoint.broker.ack(got.take([1, 2]))
        endpoint.advance(MINUTE)

    rest = endpoint.broker.receive(readers, line)

    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0"]
    assert (bodies(rest), attempts(rest)) == ([b"3", b"4", b"5"], [1, 1, 1])


def test_what_was_acked_is_no_failure_when_a_shorter_batch_makes_it_come_again(
    endpoint: Endpoint, line: str, readers: str
) -> None:
    for _ in range(3):
        got = endpoint.broker.receive(readers, line, limit=3, invisible_duration_ms=MINUTE)
        endpoint.broker.ack(got.take([2]))
        endpoint.advance(MINUTE)
    endpoint.broker.ack(endpoint.broker.receive(readers, line, limit=1))

    again = endpoint.broker.receive(readers, line, limit=1)

    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0"]
    assert (bodies(again), attempts(again)) == ([b"2"], [3])


def test_what_was_acked_and_is_released_is_no_failure(
    endpoint: Endpoint, line: str, group: Make
) -> None:
    once = group(order="queue", max_attempts=1)
    got = endpoint.broker.receive(once, line, limit=3)
    endpoint.broker.ack(got.take([1]))
    endpoint.broker.release(got.take([0, 2]))
    endpoint.broker.release(endpoint.broker.receive(once, line, limit=3))
    endpoint.broker.ack(endpoint.broker.receive(once, line, limit=1))

    again = endpoint.broker.receive(once, line, limit=3)

    assert endpoint.bodies(f"%DLQ%{once}") == []
    assert (bodies(again), attempts(again)) == ([b"1", b"2", b"3"], [1, 1, 1])


def test_revive_buries_a_poisoned_message_too(endpoint: Endpoint, line: str, readers: str) -> None:
    for _ in range(3):
        endpoint.broker.receive(readers, line, limit=3, invisible_duration_ms=MINUTE)
        endpoint.advance(MINUTE)
        endpoint.broker.revive()

    rest = endpoint.broker.receive(readers, line, limit=3)

    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0"]
    assert (bodies(rest), attempts(rest)) == ([b"1", b"2", b"3"], [1, 1, 1])


def test_revive_opens_no_queue_early(endpoint: Endpoint, line: str, readers: str) -> None:
    got = endpoint.broker.receive(readers, line, limit=2, invisible_duration_ms=MINUTE)
    endpoint.broker.change_invisible_duration(got.take([0]), 1_000)
    endpoint.advance(1_000)

    endpoint.broker.revive()

    assert endpoint.broker.receive(readers, line).num_rows == 0
    endpoint.broker.ack(got.take([1]))
    again = endpoint.broker.receive(readers, line, limit=2)
    assert (bodies(again), attempts(again)) == ([b"0", b"1"], [2, 2])


def test_the_last_failure_said_of_several_buries_the_first_and_spares_the_others(
    endpoint: Endpoint, line: str, readers: str, outcomes: Make
) -> None:
    answer = {}
    for _ in range(3):
        got = endpoint.broker.receive(readers, line, limit=3)
        failed = outcomes(got.take([0, 1]), "retry", retry_after_ms=0)
        answer = endpoint.broker.settle(readers, failed)
        endpoint.broker.change_invisible_duration(got.take([2]), 1)
        endpoint.advance(1)

    rest = endpoint.broker.receive(readers, line, limit=3)

    assert (answer["retried"], answer["dead_lettered"]) == (1, 1)
    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0"]
    assert bodies(rest) == [b"1", b"2", b"3"]
    assert attempts(rest) == [1, 2, 1]


def test_each_give_up_dead_letters_its_message(
    endpoint: Endpoint, line: str, readers: str, outcomes: Make
) -> None:
    got = endpoint.broker.receive(readers, line, limit=3)
    said = [(0, "give_up"), (1, "retry"), (2, "give_up")]
    given_up = pa.concat_tables([outcomes(got.take([row]), outcome) for row, outcome in said])

    answer = endpoint.broker.settle(readers, given_up)
    endpoint.advance(BACKOFF_MS)

    assert (answer["retried"], answer["dead_lettered"]) == (1, 2)
    assert sorted(endpoint.bodies(f"%DLQ%{readers}")) == [b"0", b"2"]
    assert bodies(endpoint.broker.receive(readers, line)) == [b"1", b"3", b"4", b"5"]


def test_a_receipt_behind_a_dead_message_stays_good(
    endpoint: Endpoint, line: str, readers: str, outcomes: Make
) -> None:
    got = endpoint.broker.receive(readers, line, limit=3)
    endpoint.broker.settle(readers, outcomes(got.take([0]), "dead_letter", reason="boom"))
    blocked = endpoint.broker.receive(readers, line)

    endpoint.broker.ack(got.take([1, 2]))

    assert endpoint.bodies(f"%DLQ%{readers}") == [b"0"]
    assert blocked.num_rows == 0
    assert bodies(endpoint.broker.receive(readers, line)) == [b"3", b"4", b"5"]


def test_a_batch_may_be_forwarded_to_the_dead_letters_one_by_one(
    endpoint: Endpoint, line: str, readers: str
) -> None:
    got = endpoint.broker.receive(readers, line, limit=3)
    endpoint.broker.ack(got.take([2]))
    for row in (1, 0):
        endpoint.broker.forward_to_dead_letter_queue(got.take([row]))

    rest = endpoint.broker.receive(readers, line)

    assert sorted(endpoint.bodies(f"%DLQ%{readers}")) == [b"0", b"1"]
    assert bodies(rest) == [b"3", b"4", b"5"]


def test_a_parked_message_holds_the_whole_queue_until_it_is_unparked(
    endpoint: Endpoint, line: str, parking: str, fail: Make
) -> None:
    got = endpoint.broker.receive(parking, line, limit=3)
    fail(parking, got.take([1]), reason="no engine")
    endpoint.broker.ack(got.take([0, 2]))
    endpoint.advance(12 * 60 * MINUTE)
    endpoint.broker.revive()
    held = endpoint.broker.receive(parking, line)
    parked = f"SELECT queue_offset, waiting, reason FROM parked WHERE consumer_group = '{parking}'"
    told = endpoint.sql(parked)
    facts = endpoint.broker.due()["groups"][parking]["topics"][line]

    answer = endpoint.broker.unpark(parking)

    assert held.num_rows == 0
    assert told == [{"queue_offset": 1, "waiting": 3, "reason": "no engine"}]
    assert (facts["ready"], facts["parked"], facts["next_visible_ms"]) == (0, 1, None)
    assert answer["unparked"] == 1
    again = endpoint.broker.receive(parking, line)
    assert (bodies(again), attempts(again)) == (
        [b"1", b"2", b"3", b"4", b"5"],
        [1, 1, 1, 1, 1],
    )


def test_each_parked_message_of_a_queue_keeps_its_own_failure(
    endpoint: Endpoint, line: str, parking: str, fail: Make
) -> None:
    got = endpoint.broker.receive(parking, line, limit=3)
    fail(parking, got.take([1]), reason="no engine")
    first_ms = endpoint.clock.now_ms()
    endpoint.advance(5)
    fail(parking, got.take([0]), reason="no wings")
    columns = "queue_offset, delivery_attempts, parked_at_ms, reason"

    told = endpoint.sql(
        f"SELECT {columns} FROM parked WHERE consumer_group = '{parking}' ORDER BY queue_offset"
    )

    assert [tuple(row.values()) for row in told] == [
        (0, 1, first_ms + 5, "no wings"),
        (1, 1, first_ms, "no engine"),
    ]


def test_a_parked_message_may_be_skipped(
    endpoint: Endpoint, line: str, parking: str, fail: Make
) -> None:
    got = endpoint.broker.receive(parking, line, limit=3)
    fail(parking, got.take([0]))
    endpoint.broker.ack(got.take([1]))

    answer = endpoint.broker.unpark(parking, skip=True)
    blocked = endpoint.broker.receive(parking, line)
    endpoint.broker.ack(got.take([2]))

    assert answer["skipped"] == 1
    assert endpoint.bodies(f"%DLQ%{parking}") == [b"0"]
    assert blocked.num_rows == 0
    assert bodies(endpoint.broker.receive(parking, line)) == [b"3", b"4", b"5"]


def test_a_redriven_message_comes_first_when_the_batch_is_over(
    endpoint: Endpoint, line: str, readers: str
) -> None:
    endpoint.broker.forward_to_dead_letter_queue(endpoint.broker.receive(readers, line, limit=1))
    held = endpoint.broker.receive(readers, line, limit=1)

    assert redrive(endpoint, readers, 0) == ["redriven"]
    meanwhile = endpoint.broker.receive(readers, line)
    endpoint.broker.ack(held)
    got = endpoint.broker.receive(readers, line)

    assert bodies(held) == [b"1"]
    assert meanwhile.num_rows == 0
    assert bodies(got) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert attempts(got) == [1, 2, 1, 1, 1, 1]
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(held)


def test_what_was_acked_behind_a_gap_may_be_redriven(
    endpoint: Endpoint, line: str, readers: str
) -> None:
    for _ in range(2):  # it dies twice: the second letter is opened while it is acked, but waits
        endpoint.broker.forward_to_dead_letter_queue(
            endpoint.broker.receive(readers, line, limit=1)
        )
        redrive(endpoint, readers, endpoint.stored(f"%DLQ%{readers}") - 1)
    letters = endpoint.bodies(f"%DLQ%{readers}")
    got: pa.Table = endpoint.broker.receive(readers, line, limit=2)
    endpoint.broker.ack(got)

    assert letters == [b"0", b"0"]
    assert bodies(got) == [b"0", b"1"]
    assert endpoint.drain(line, readers) == [b"2", b"3", b"4", b"5"]
