"""Checks turn red for what they are there for, against a real broker."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.orchestration import queries
from rmq_pipeline.orchestration.checks import Thresholds, fallback_result, watched_consumer
from rmq_pipeline.orchestration.declarations import DeclaredGroup, topic
from rmq_pipeline.orchestration.resources import BrokerResource
from tests.conftest import Eventually
from tests.orchestration.conftest import SMALL, Send

GROUP = DeclaredGroup(
    "flights", topic("departures", type="fifo"), order="message_group", max_attempts=1
)
MINUTE_MS = 60_000


@dg.asset
def flights() -> None:
    """Stands for a consumer."""


@pytest.fixture(autouse=True)
def _group(client: Client) -> None:
    GROUP.ensure(client)


def evaluate(resource: BrokerResource, **thresholds: Any) -> dict[str, dg.AssetCheckEvaluation]:
    watched = watched_consumer(
        "flights",
        flights.key,
        window="flights",
        ordered=True,
        thresholds=Thresholds(**thresholds),
    )
    checks = watched.definitions()
    result = dg.materialize([flights, *checks], resources={"broker": resource})
    return {check.check_name: check for check in result.get_asset_check_evaluations()}


def receive(client: Client, **window: Any) -> pa.Table:
    return client.receive("flights", "departures", invisible_duration_ms=5 * MINUTE_MS, **window)


def test_all_are_green_after_ordinary_work(
    client: Client, resource: BrokerResource, send: Send
) -> None:
    send("departures", 4, message_group=["a", "b", "a", "b"])
    client.ack(receive(client))

    checks = evaluate(resource)

    assert {name: check.passed for name, check in checks.items()} == {
        "no_loss": True,
        "oldest_unread": True,
        "dead_letters": True,
        "one_filter": True,
        "order": True,
    }
    assert checks["oldest_unread"].metadata["lag"].value == 0


def test_messages_that_wait_too_long_are_told(
    resource: BrokerResource, send: Send, clock: ManualClock
) -> None:
    send("departures", 3, message_group=["a", "b", "c"])
    clock.advance(16 * MINUTE_MS)

    check = evaluate(resource)["oldest_unread"]

    assert not check.passed
    assert check.metadata["lag"].value == 3


def test_lag_is_told_with_what_the_filter_takes_of_it(
    client: Client, resource: BrokerResource, send: Send
) -> None:
    client.receive("flights", "departures", filter="new")
    send("departures", 3, message_group=["a", "b", "c"], tag=["new", "old", "old"])

    told = evaluate(resource)["oldest_unread"].metadata

    assert (told["lag"].value, told["matching_lag"].value) == (3, 1)
    assert told["matching_lag_estimated"].value is False


def test_dead_letters_are_told_with_their_reasons(
    client: Client, resource: BrokerResource, send: Send
) -> None:
    send("departures", 1, message_group=["a"])
    client.forward_to_dead_letter_queue(receive(client), reason="no departure time")

    check = evaluate(resource)["dead_letters"]

    assert not check.passed
    assert check.metadata["dead_letters"].value == 1
    reasons = check.metadata["reasons"]
    assert isinstance(reasons, dg.TableMetadataValue)
    assert [record.data["reason"] for record in reasons.records] == ["no departure time"]


def test_expected_dead_letters_are_green(
    client: Client, resource: BrokerResource, send: Send
) -> None:
    send("departures", 1, message_group=["a"])
    client.forward_to_dead_letter_queue(receive(client))

    assert evaluate(resource, dead_letters=1)["dead_letters"].passed


def test_dead_letters_that_were_redriven_are_not_counted(
    client: Client, resource: BrokerResource, send: Send
) -> None:
    send("departures", 2, message_group=["a", "b"])
    client.forward_to_dead_letter_queue(receive(client), reason="no departure time")
    letters = client.sql("SELECT queue_id, queue_offset FROM dead_letters ORDER BY ALL")
    client.redrive("flights", letters.slice(0, 1), redrive_id="first")
    client.ack(receive(client))
    one_left = evaluate(resource)["dead_letters"]

    client.redrive("flights", letters.slice(1), redrive_id="second")
    client.ack(receive(client))
    none_left = evaluate(resource)["dead_letters"]

    assert (one_left.passed, one_left.metadata["dead_letters"].value) == (False, 1)
    assert (none_left.passed, none_left.metadata["dead_letters"].value) == (True, 0)


def test_messages_in_flight_and_released_are_not_lost(client: Client, send: Send) -> None:
    send("departures", 4, message_group=["a", "a", "b", "b"])
    window = client.open_window("consumer/flights", owner="run", duration_ms=MINUTE_MS)
    receive(client, window=("consumer/flights", window["epoch"]))
    in_flight = queries.lost(client, "flights")

    client.open_window("consumer/flights", owner="next", duration_ms=MINUTE_MS, takeover=True)

    assert (in_flight, queries.lost(client, "flights")) == (0, 0)


def test_messages_behind_a_failed_one_are_not_lost(client: Client, send: Send) -> None:
    GROUP.ensure(client)
    client.alter_group("flights", max_attempts=3, backoff_ms=(MINUTE_MS,))
    send("departures", 3, message_group=["a", "a", "a"])
    received = receive(client)
    outcomes = pa.table({"receipt_handle": received["receipt_handle"][:1], "outcome": ["retry"]})

    client.settle("flights", outcomes)

    assert queries.lost(client, "flights") == 0


@pytest.mark.parametrize("order", ["message_group", "none"])
def test_parked_messages_and_those_behind_them_are_not_lost(
    client: Client, send: Send, order: str
) -> None:
    client.create_group("parking", order=order, max_attempts=1, on_failure="park")
    send("departures", 5, message_group=["a", "a", "b", "a", "b"])
    received = client.receive("parking", "departures", limit=4).sort_by("queue_offset")
    failed = pa.table({"receipt_handle": received["receipt_handle"][:1], "outcome": ["retry"]})

    client.settle("parking", failed)

    assert client.sql("FROM parked").num_rows == 1
    assert queries.lost(client, "parking") == 0


def test_a_reset_loses_nothing(client: Client, send: Send) -> None:
    send("departures", 2, message_group=["a", "b"])
    receive(client)

    client.reset_offset("flights", "departures", to_latest=True)

    assert queries.lost(client, "flights") == 0


def test_settling_in_order_is_no_violation(client: Client, send: Send) -> None:
    send("departures", 6, message_group=["a", "b"] * 3)
    while (received := receive(client)).num_rows:
        client.ack(received)

    assert queries.order_violations(client, "flights") == 0


def test_a_redrive_is_no_violation(client: Client, send: Send) -> None:
    send("departures", 2, message_group=["a", "a"])
    first = receive(client).sort_by("queue_offset").slice(0, 1)
    client.forward_to_dead_letter_queue(first)
    client.ack(receive(client))
    letter = client.sql("SELECT queue_id, queue_offset FROM dead_letters")
    assert client.redrive("flights", letter, redrive_id="again")["outcome"][0].as_py() == "redriven"

    client.ack(receive(client))

    assert client.sql("SELECT outcome FROM redrives")["outcome"].to_pylist() == ["acked"]
    assert queries.order_violations(client, "flights") == 0


def test_settling_out_of_order_is_a_violation(client: Client, send: Send) -> None:
    client.create_group("careless", order="none")
    send("departures", 2, message_group=["a", "a"])
    received = client.receive("careless", "departures").sort_by("queue_offset")
    client.ack(received.slice(1))
    client.ack(received.slice(0, 1))

    assert queries.order_violations(client, "careless") == 1


def test_fallback_by_the_broker_is_red_for_an_hour(
    tmp_path: Path, clock: ManualClock, eventually: Eventually
) -> None:
    with ExitStack() as stack:
        opened = Broker.open(tmp_path / "alone", clock=clock, upkeep="dagster", settings=SMALL)
        endpoint = stack.enter_context(FlightServer(stack.enter_context(opened)))
        client = stack.enter_context(Client(endpoint.address))
        client.create_topic("later", type="delay")
        client.send("later", pa.table({"body": [b"x"], "delay_level": [1]}))

        clock.advance(2 * MINUTE_MS)

        def is_red() -> bool:
            clock.advance(1_000)
            return not fallback_result(client, "deliver_scheduled").passed

        eventually(is_red)
        assert fallback_result(client, "revive").passed
        clock.advance(61 * MINUTE_MS)
        assert fallback_result(client, "deliver_scheduled").passed


def test_no_fallback_is_green(client: Client) -> None:
    assert fallback_result(client, "revive").passed


def test_members_that_receive_with_different_filters_are_told(
    client: Client, resource: BrokerResource, send: Send
) -> None:
    send("departures", 2, message_group=["a", "b"])
    for client_id, tag in (("one", "new"), ("two", "old")):
        client.receive("flights", "departures", filter=tag, client_id=client_id)

    check = evaluate(resource)["one_filter"]

    assert not check.passed
    found: Any = check.metadata["filters"]
    assert [record.data for record in found.records] == [
        {"topic": "departures", "filter": "new"},
        {"topic": "departures", "filter": "old"},
    ]
