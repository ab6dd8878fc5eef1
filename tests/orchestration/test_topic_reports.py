"""The sensor that shows how topics move."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import dagster as dg
import pytest

from rmq_pipeline.clock import ManualClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.declarations import DeclaredGroup, topic
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.topic_reports import topic_report_sensor
from tests.orchestration.conftest import Send

NEWS = topic("news")
GROUP = DeclaredGroup("readers", NEWS)
MINUTE_MS = 60_000

Tick = Callable[..., dg.SensorResult]


@pytest.fixture
def tick(instance: dg.DagsterInstance, resource: BrokerResource) -> Tick:
    sensor = topic_report_sensor([NEWS], ["readers"])

    def tick(cursor: str | None = None, broker: BrokerResource = resource) -> dg.SensorResult:
        with dg.build_sensor_context(
            instance=instance, cursor=cursor, resources={"broker": broker}
        ) as context:
            result = sensor(context)
        assert isinstance(result, dg.SensorResult)
        return result

    return tick


def reported(result: dg.SensorResult) -> dict[str, dict[str, Any]]:
    return {
        event.asset_key.to_user_string(): {k: v.value for k, v in event.metadata.items()}
        for event in result.asset_events
    }


def test_a_topic_without_a_reader_is_created(tick: Tick, client: Client) -> None:
    found = reported(tick())

    assert found["news"] == {"head": 0}
    assert client.describe_topic("news")["type"] == "normal"


def test_a_topic_that_is_gone_is_made_again(tick: Tick, client: Client, clock: ManualClock) -> None:
    first = tick()
    client.delete_topic("news")
    clock.advance(MINUTE_MS)
    second = tick(first.cursor)

    tick(second.cursor)

    assert client.describe_topic("news")["type"] == "normal"


def test_a_topic_of_another_type_is_left_and_the_rest_reported(tick: Tick, client: Client) -> None:
    client.create_topic("news", type="delay")

    assert reported(tick())["news"] == {"head": 0}
    assert client.describe_topic("news")["type"] == "delay"


def test_head_and_backlog_are_reported(tick: Tick, client: Client, send: Send) -> None:
    GROUP.ensure(client)
    send("news", 5)

    assert reported(tick())["news"] == {"head": 5, "backlog_readers": 5}


def test_nothing_is_repeated_within_a_minute(
    tick: Tick, client: Client, send: Send, clock: ManualClock
) -> None:
    GROUP.ensure(client)
    first = tick()
    send("news", 5)
    clock.advance(MINUTE_MS - 1)

    assert not reported(tick(first.cursor))


def test_what_has_moved_is_reported_with_its_rate(
    tick: Tick, client: Client, send: Send, clock: ManualClock
) -> None:
    GROUP.ensure(client)
    first = tick()
    send("news", 120)
    clock.advance(MINUTE_MS)

    found = reported(tick(first.cursor))

    assert found == {"news": {"head": 120, "backlog_readers": 120, "messages_per_second": 2.0}}


def test_what_has_not_moved_is_not_reported(tick: Tick, client: Client, clock: ManualClock) -> None:
    GROUP.ensure(client)
    first = tick()
    clock.advance(MINUTE_MS)

    assert not reported(tick(first.cursor))


def test_members_are_reported_with_their_queues_and_rates(
    tick: Tick, client: Client, send: Send
) -> None:
    GROUP.ensure(client)
    send("news", 5)
    heard(client, "one", queues=[0, 2], ok_per_s=12.5)
    heard(client, "two", queues=[1], ok_per_s=0.0)
    client.heartbeat("readers", "elsewhere", topics=["other"], details={})

    rows = members(tick())

    assert [(row["client_id"], row["queues"]) for row in rows] == [("one", "0, 2"), ("two", "1")]
    assert rows[0]["consumer_group"] == "readers"
    assert rows[0]["model"] == "clustering"
    assert [row["consumed_per_second"] for row in rows] == [12.5, 0.0]


def test_queues_that_change_hands_are_reported(
    tick: Tick, client: Client, clock: ManualClock
) -> None:
    GROUP.ensure(client)
    heard(client, "one", queues=[0, 1], ok_per_s=1.0)
    first = tick()
    clock.advance(MINUTE_MS)
    heard(client, "one", queues=[0, 1], ok_per_s=2.0)
    same = tick(first.cursor)
    heard(client, "one", queues=[0], ok_per_s=2.0)

    (row,) = members(tick(same.cursor))

    assert not reported(same)
    assert row["queues"] == "0"


def test_a_member_that_says_nonsense_is_shown_as_far_as_it_can_be(
    tick: Tick, client: Client
) -> None:
    GROUP.ensure(client)
    nonsense = {"queues": 7, "statistics": {"news": {"consume_ok_per_s": "many"}}, "model": None}
    client.heartbeat("readers", "odd", topics=["news"], details=nonsense)

    (row,) = members(tick())

    assert (row["client_id"], row["queues"], row["model"]) == ("odd", "", "")


def members(result: dg.SensorResult) -> list[dict[str, Any]]:
    """The table of members in the report of the topic."""
    event = result.asset_events[0]
    shown = event.metadata["members"]
    assert isinstance(shown, dg.TableMetadataValue)
    return [dict(record.data) for record in shown.records]


def heard(client: Client, client_id: str, *, queues: list[int], ok_per_s: float) -> None:
    details = {
        "model": "clustering",
        "order": "key",
        "queues": {"news": queues},
        "statistics": {"news": {"consume_ok_per_s": ok_per_s}},
    }
    client.heartbeat("readers", client_id, topics=["news"], details=details)


def test_dead_letters_are_reported(
    tick: Tick, client: Client, send: Send, clock: ManualClock
) -> None:
    GROUP.ensure(client)
    first = tick()
    send("news")
    client.forward_to_dead_letter_queue(client.receive("readers", "news"))
    clock.advance(MINUTE_MS)

    assert reported(tick(first.cursor))["readers_dead_letters"]["head"] == 1


def test_a_broker_that_is_away_is_a_reason_to_skip(tick: Tick, away: BrokerResource) -> None:
    assert "rmq up" in str(tick(None, away).skip_reason)


@pytest.fixture
def tick_of_others(instance: dg.DagsterInstance, resource: BrokerResource) -> Tick:
    """A tick of a location whose group has its consumers elsewhere."""
    sensor = topic_report_sensor([NEWS], ["readers"], others=[GROUP])

    def tick(cursor: str | None) -> dg.SensorResult:
        with dg.build_sensor_context(
            instance=instance, cursor=cursor, resources={"broker": resource}
        ) as context:
            result = sensor(context)
        assert isinstance(result, dg.SensorResult)
        return result

    return tick


def test_a_group_outside_dagster_is_reported_in_numbers(
    tick_of_others: Tick, send: Send, clock: ManualClock
) -> None:
    first = tick_of_others(None)
    send("news", 5)
    clock.advance(MINUTE_MS)
    found = reported(tick_of_others(first.cursor))["readers"]

    assert reported(first)["readers"]["lag"] == 0
    assert (found["lag"], found["oldest_waited_seconds"], found["live_members"]) == (5, 60.0, 0)


def test_an_abandoned_group_is_reported_at_growing_intervals(
    tick_of_others: Tick, send: Send, clock: ManualClock
) -> None:
    cursor = tick_of_others(None).cursor
    send("news")
    minutes, before = [], 0
    for minute in (1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 123, 124, 183, 184):
        clock.advance((minute - before) * MINUTE_MS)
        before = minute
        result = tick_of_others(cursor)
        cursor = result.cursor
        if "readers" in reported(result):
            minutes.append(minute)
    send("news")
    clock.advance(MINUTE_MS)
    moved = tick_of_others(cursor)
    clock.advance(MINUTE_MS)
    after_it = tick_of_others(moved.cursor)

    assert minutes == [1, 2, 4, 8, 16, 32, 64, 124, 184]
    assert reported(moved)["readers"]["lag"] == 2
    assert reported(after_it)["readers"]["lag"] == 2


def test_a_cursor_of_an_older_version_is_read(
    tick_of_others: Tick, send: Send, clock: ManualClock
) -> None:
    tick_of_others(None)
    send("news")
    old = {"at_ms": clock.now_ms(), "head": 1, "backlog": {}, "members": {}}
    clock.advance(MINUTE_MS)

    found = reported(tick_of_others(json.dumps({"group/readers": old})))

    assert found["readers"]["lag"] == 1
