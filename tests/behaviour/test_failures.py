"""Why a delivery failed is kept and shown, and alike failures are told by their signature."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rmq_pipeline.failure import signature_of

if TYPE_CHECKING:
    from tests.behaviour.conftest import Door, Make


@pytest.fixture
def door(shared_door: Door) -> Door:
    return shared_door


SAID = {"reason": "no engine 7", "error_type": "EngineError", "run_id": "run-1"}


def test_why_a_delivery_failed_is_shown_while_it_waits(
    door: Door, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(2))
    fail(readers, door.broker.receive(name, readers), **SAID)

    query = "SELECT reason, error_type, run_id, signature FROM retrying WHERE consumer_group = '{}'"
    rows = door.sql(query.format(readers))

    signature = signature_of("no engine 8", error_type="EngineError")
    assert rows == [{**SAID, "signature": signature}] * 2


def test_alike_failures_have_one_signature_among_the_dead_letters(
    door: Door, topic: Make, group: Make, messages: Make, outcomes: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(4))
    got = door.broker.receive(name, readers)
    for row, reason in enumerate(["row 1 of 'a'", "row 22 of 'b'", "no row", "row 3 of 'c'"]):
        door.broker.settle(readers, outcomes(got.slice(row, 1), "dead_letter", reason=reason))

    rows = door.sql(
        "SELECT count(*) AS n FROM dead_letters"
        f" WHERE consumer_group = '{readers}' GROUP BY signature ORDER BY n"
    )

    assert [row["n"] for row in rows] == [1, 3]


def test_the_last_failure_is_kept_when_a_later_delivery_ends_without_a_word(
    door: Door, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(max_attempts=2)
    door.broker.send(name, messages(1))
    fail(readers, door.broker.receive(name, readers), retry_after_ms=0, **SAID)
    door.broker.receive(name, readers, invisible_duration_ms=1_000)
    door.advance(1_000)

    door.broker.revive()

    query = "SELECT reason, error_type, run_id FROM dead_letters WHERE consumer_group = '{}'"
    assert door.sql(query.format(readers)) == [SAID]
