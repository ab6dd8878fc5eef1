"""The sensor that shows how topics move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dagster as dg
import pytest

from rmq_pipeline.clock import ManualClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.broker_resource import BrokerResource
from rmq_pipeline.orchestration.topic_assets import DeclaredGroup, topic
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


def test_unknown_topic_is_not_reported(tick: Tick) -> None:
    assert "news" not in reported(tick())


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


def test_dead_letters_are_reported(
    tick: Tick, client: Client, send: Send, clock: ManualClock
) -> None:
    GROUP.ensure(client)
    first = tick()
    send("news")
    client.forward_to_dead_letter_queue(client.receive("news", "readers"))
    clock.advance(MINUTE_MS)

    assert reported(tick(first.cursor))["readers_dead_letters"]["head"] == 1


def test_a_broker_that_is_away_is_a_reason_to_skip(tick: Tick, away: BrokerResource) -> None:
    assert "rmq up" in str(tick(None, away).skip_reason)
