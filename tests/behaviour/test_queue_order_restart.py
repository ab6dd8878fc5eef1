"""Order by queue over restarts, and as it was at a moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors
from tests.behaviour.received import attempts, bodies

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

MINUTE = 60_000


@pytest.fixture
def line(endpoint: Endpoint, topic: Make, messages: Make) -> str:
    """Six messages in one queue."""
    name = str(topic(queues=1))
    endpoint.broker.send(name, messages(6))
    return name


@pytest.fixture
def readers(group: Make) -> str:
    return str(group(order="queue", max_attempts=2))


def reopen(endpoint: Endpoint, *, dispatched: bool) -> None:
    """With the events in the tables, or in the log alone."""
    if dispatched:
        endpoint.inside.engine.dispatched()
    endpoint.reopen()


@pytest.mark.every_endpoint
@pytest.mark.parametrize("dispatched", [True, False])
def test_a_batch_and_what_is_acked_of_it_outlive_a_restart(
    endpoint: Endpoint, line: str, readers: str, *, dispatched: bool
) -> None:
    got = endpoint.broker.receive(readers, line, limit=4, invisible_duration_ms=MINUTE)
    endpoint.broker.ack(got.take([0, 2]))

    reopen(endpoint, dispatched=dispatched)

    assert endpoint.broker.receive(readers, line).num_rows == 0
    with pytest.raises(errors.ReceiptHandleError):
        endpoint.broker.ack(got["receipt_handle"].to_pylist()[2:3])
    endpoint.advance(MINUTE)
    again = endpoint.broker.receive(readers, line, limit=3)
    assert (bodies(again), attempts(again)) == ([b"1", b"2", b"3"], [2, 2, 2])


@pytest.mark.parametrize("dispatched", [True, False])
def test_a_gap_is_closed_by_an_ack_after_a_restart(
    endpoint: Endpoint, line: str, readers: str, *, dispatched: bool
) -> None:
    got = endpoint.broker.receive(readers, line, limit=3)
    endpoint.broker.ack(got.take([1, 2]))

    reopen(endpoint, dispatched=dispatched)
    endpoint.broker.ack(got.take([0]))

    assert bodies(endpoint.broker.receive(readers, line)) == [b"3", b"4", b"5"]
    query = "SELECT count(*) AS n FROM events WHERE kind = 'ack'"
    assert endpoint.sql(query) == [{"n": 3}]


@pytest.mark.parametrize("dispatched", [True, False])
def test_an_attempt_may_be_repeated_after_a_restart(
    endpoint: Endpoint, line: str, readers: str, *, dispatched: bool
) -> None:
    who: dict[str, Any] = {"limit": 2, "client_id": "me"}
    endpoint.broker.receive(readers, line, attempt_id="one", **who)

    reopen(endpoint, dispatched=dispatched)
    other = endpoint.broker.receive(readers, line, attempt_id="two", **who)
    again = endpoint.broker.receive(readers, line, attempt_id="one", **who)
    endpoint.broker.ack(again)

    assert other.num_rows == 0
    assert (bodies(again), attempts(again)) == ([b"0", b"1"], [1, 1])
    assert bodies(endpoint.broker.receive(readers, line)) == [b"2", b"3", b"4", b"5"]


def test_the_tables_tell_of_a_batch_as_it_was(endpoint: Endpoint, line: str, readers: str) -> None:
    got = endpoint.broker.receive(readers, line, limit=3, attempt_id="one")
    endpoint.advance(10)
    endpoint.broker.ack(got.take([2]))
    at_ms = endpoint.clock.now_ms()
    endpoint.advance(10)
    endpoint.broker.ack(got.take([0, 1]))

    columns = "committed_offset, in_flight, retrying, parked"
    then = endpoint.sql(f"SELECT {columns} FROM progress_at({at_ms})")
    lag = endpoint.sql(f"SELECT lag FROM lag_at({at_ms})")
    flying = endpoint.sql(f"SELECT queue_offset, epoch FROM in_flight_at({at_ms}) ORDER BY 1")
    trace = endpoint.sql(
        "SELECT t.what FROM message_trace AS t JOIN messages AS m USING (message_id)"
        " WHERE m.queue_offset = 2 ORDER BY t.position, t.row"
    )

    assert then == [{"committed_offset": 0, "in_flight": 2, "retrying": 0, "parked": 0}]
    assert lag == [{"lag": 5}]
    assert flying == [{"queue_offset": 0, "epoch": 0}, {"queue_offset": 1, "epoch": 0}]
    assert [row["what"] for row in trace] == ["stored", "lease", "ack_ahead", "ack"]


def test_the_tables_tell_what_waits_behind_a_parked_message_as_it_was(
    endpoint: Endpoint, line: str, group: Make, fail: Make
) -> None:
    parking = group(order="queue", max_attempts=1, on_failure="park")
    got = endpoint.broker.receive(parking, line, limit=3)
    fail(parking, got.take([0]))
    endpoint.broker.ack(got.take([1]))
    at_ms = endpoint.clock.now_ms()
    endpoint.advance(1)
    endpoint.broker.unpark(parking)

    told = endpoint.sql(f"SELECT queue_offset, waiting FROM parked_at({at_ms})")

    assert told == [{"queue_offset": 0, "waiting": 4}]
