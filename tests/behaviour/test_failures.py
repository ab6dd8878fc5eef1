"""Why a delivery failed is kept and shown, and alike failures are told by their signature."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline.failure import signature_of
from rmq_pipeline.limits import TRACEBACK_LENGTH

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


SAID = {"reason": "no engine 7", "error_type": "EngineError", "run_id": "run-1"}


def test_why_a_delivery_failed_is_shown_while_it_waits(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(2))
    fail(readers, endpoint.broker.receive(readers, name), **SAID)

    query = "SELECT reason, error_type, run_id, signature FROM retrying WHERE consumer_group = '{}'"
    rows = endpoint.sql(query.format(readers))

    signature = signature_of("no engine 8", error_type="EngineError")
    assert rows == [{**SAID, "signature": signature}] * 2


def test_alike_failures_have_one_signature_among_the_dead_letters(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, outcomes: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(4))
    got = endpoint.broker.receive(readers, name)
    for row, reason in enumerate(["row 1 of 'a'", "row 22 of 'b'", "no row", "row 3 of 'c'"]):
        endpoint.broker.settle(readers, outcomes(got.slice(row, 1), "dead_letter", reason=reason))

    rows = endpoint.sql(
        "SELECT count(*) AS n FROM dead_letters"
        f" WHERE consumer_group = '{readers}' GROUP BY signature ORDER BY n"
    )

    assert [row["n"] for row in rows] == [1, 3]


def test_the_last_failure_is_kept_when_a_later_delivery_ends_without_a_word(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, fail: Make
) -> None:
    name, readers = topic(queues=1), group(max_attempts=2)
    endpoint.broker.send(name, messages(1))
    fail(readers, endpoint.broker.receive(readers, name), retry_after_ms=0, **SAID)
    endpoint.broker.receive(readers, name, invisible_duration_ms=1_000)
    endpoint.advance(1_000)

    endpoint.broker.revive()

    query = "SELECT reason, error_type, run_id FROM dead_letters WHERE consumer_group = '{}'"
    assert endpoint.sql(query.format(readers)) == [SAID]


@pytest.mark.parametrize("order", ["none", "message_group", "queue"])
def test_a_retry_in_place_counts_and_its_receipt_stays_good(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make, outcomes: Make, order: str
) -> None:
    name, readers = topic(type="fifo", queues=1), group(order=order, max_attempts=3)
    endpoint.broker.send(name, messages(3, groups=["a", "a", "a"]))
    got = endpoint.broker.receive(readers, name)

    failed = outcomes(got.slice(0, 1), "retry_in_place", reason="no database")
    for _ in range(2):
        assert endpoint.broker.settle(readers, failed)["retried"] == 1
    query = (
        f"SELECT delivery_attempt FROM in_flight WHERE consumer_group = '{readers}' ORDER BY ALL"
    )
    assert endpoint.broker.sql(query)["delivery_attempt"].to_pylist() == [1, 1, 3]

    endpoint.broker.settle(readers, failed)  # its holder tries more often than the group does
    assert endpoint.broker.sql(query)["delivery_attempt"].to_pylist() == [1, 1, 3]
    endpoint.broker.release(got)  # the running attempt was none
    again = endpoint.broker.receive(readers, name)
    assert again["delivery_attempt"].to_pylist() == [3, 1, 1]
    endpoint.broker.ack(again)
    assert endpoint.drain(name, readers) == []


def test_the_end_of_a_long_traceback_is_kept_with_the_delivery(
    endpoint: Endpoint, topic: Make, group: Make, messages: Make
) -> None:
    name, readers = topic(queues=1), group()
    endpoint.broker.send(name, messages(1))
    got = endpoint.broker.receive(readers, name)

    where = (
        "Traceback (most recent call last):\n" + "x" * TRACEBACK_LENGTH + "\nKeyError: 'carrier'"
    )
    failed = {"outcome": ["retry"], "reason": ["KeyError: 'carrier'"], "traceback": [where]}
    endpoint.broker.settle(readers, pa.table({"receipt_handle": got["receipt_handle"], **failed}))

    query = "SELECT reason, traceback FROM retrying WHERE consumer_group = '{}'"
    (row,) = endpoint.sql(query.format(readers))
    assert row == {"reason": "KeyError: 'carrier'", "traceback": where[-TRACEBACK_LENGTH:]}
