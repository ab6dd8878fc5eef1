"""Why a delivery failed is kept and shown, and alike failures are told by their signature."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline.failure import signature_of
from rmq_pipeline.limits import TRACEBACK_LENGTH

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
    fail(readers, door.broker.receive(readers, name), **SAID)

    query = "SELECT reason, error_type, run_id, signature FROM retrying WHERE consumer_group = '{}'"
    rows = door.sql(query.format(readers))

    signature = signature_of("no engine 8", error_type="EngineError")
    assert rows == [{**SAID, "signature": signature}] * 2


def test_alike_failures_have_one_signature_among_the_dead_letters(
    door: Door, topic: Make, group: Make, messages: Make, outcomes: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(4))
    got = door.broker.receive(readers, name)
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
    fail(readers, door.broker.receive(readers, name), retry_after_ms=0, **SAID)
    door.broker.receive(readers, name, invisible_duration_ms=1_000)
    door.advance(1_000)

    door.broker.revive()

    query = "SELECT reason, error_type, run_id FROM dead_letters WHERE consumer_group = '{}'"
    assert door.sql(query.format(readers)) == [SAID]


@pytest.mark.parametrize("order", ["none", "message_group", "queue"])
def test_a_retry_in_place_counts_and_its_receipt_stays_good(
    door: Door, topic: Make, group: Make, messages: Make, outcomes: Make, order: str
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order=order, max_attempts=3)
    door.broker.send(name, messages(3, groups=["a", "a", "a"]))
    got = door.broker.receive(readers, name)

    failed = outcomes(got.slice(0, 1), "retry_in_place", reason="no database")
    for _ in range(2):
        assert door.broker.settle(readers, failed)["retried"] == 1
    query = (
        f"SELECT delivery_attempt FROM in_flight WHERE consumer_group = '{readers}' ORDER BY ALL"
    )
    assert door.broker.sql(query)["delivery_attempt"].to_pylist() == [1, 1, 3]

    door.broker.settle(readers, failed)  # its holder tries more often than the group does
    assert door.broker.sql(query)["delivery_attempt"].to_pylist() == [1, 1, 3]
    door.broker.release(got)  # the running attempt was none
    again = door.broker.receive(readers, name)
    assert again["delivery_attempt"].to_pylist() == [3, 1, 1]
    door.broker.ack(again)
    assert door.drain(name, readers) == []


def test_the_end_of_a_long_traceback_is_kept_with_the_delivery(
    door: Door, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    door.broker.send(name, messages(1))
    got = door.broker.receive(readers, name)

    where = (
        "Traceback (most recent call last):\n" + "x" * TRACEBACK_LENGTH + "\nKeyError: 'carrier'"
    )
    failed = {"outcome": ["retry"], "reason": ["KeyError: 'carrier'"], "traceback": [where]}
    door.broker.settle(readers, pa.table({"receipt_handle": got["receipt_handle"], **failed}))

    query = "SELECT reason, traceback FROM retrying WHERE consumer_group = '{}'"
    (row,) = door.sql(query.format(readers))
    assert row == {"reason": "KeyError: 'carrier'", "traceback": where[-TRACEBACK_LENGTH:]}
