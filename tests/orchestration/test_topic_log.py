"""``topic_log``: the hours that are sealed, with their rows, as the sensor tells them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import Clock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.declarations import DeclaredTopic, topic
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.topic_log import log_key, log_partitions, topic_log_sensor
from rmq_pipeline.schema import PROPERTIES
from rmq_pipeline.settings import Settings
from tests.broker.sealed_home import seal_all
from tests.orchestration.conftest import Send

HOUR_MS = 3_600_000
FIRST, END = "1970-01-01-00:00", "1970-01-02-00:00"
BORN = topic("born", partition_time="born", queues=2, log_from=FIRST, log_until=END)
BY_PROPERTY = topic("by_property", partition_time="at_ms", queues=1, log_from=FIRST, log_until=END)


@pytest.fixture
def broker(home: Path, clock: Clock) -> Iterator[Broker]:
    settings = Settings(reserve_bytes=1 << 20, log_file_bytes=1 << 20, seal_after_ms=0)
    with Broker.open(home, clock=clock, upkeep="none", settings=settings) as broker:
        yield broker


class Sensor:
    """Ticks of the sensor, each with the cursor of the last."""

    def __init__(self, resource: BrokerResource, *topics: DeclaredTopic) -> None:
        self._sensor = topic_log_sensor(topics, name="logs")
        self._resource = resource
        self.cursor: str | None = None

    def tick(self) -> list[tuple[str, dict[str, Any]]]:
        """Partition and metadata of each materialization."""
        context = dg.build_sensor_context(cursor=self.cursor, resources={"broker": self._resource})
        result = self._sensor(context)
        assert isinstance(result, dg.SensorResult)
        self.cursor = result.cursor or self.cursor
        found = []
        for event in result.asset_events:
            assert isinstance(event, dg.AssetMaterialization)
            assert event.partition is not None
            values = {name: value.value for name, value in event.metadata.items()}
            found.append((event.partition, values))
        return found


def rows(events: list[tuple[str, dict[str, Any]]]) -> dict[str, int]:
    return {partition: values["rows"] for partition, values in events}


def test_nothing_is_told_of_what_is_not_sealed(
    client: Client, send: Send, resource: BrokerResource
) -> None:
    BORN.ensure(client)
    send("born", 2, born_at_ms=[0, HOUR_MS])

    assert Sensor(resource, BORN).tick() == []


def test_each_hour_has_its_rows_and_is_told_again_when_it_grows(
    broker: Broker, client: Client, send: Send, resource: BrokerResource
) -> None:
    BORN.ensure(client)
    sensor = Sensor(resource, BORN)
    send("born", 3, born_at_ms=[5, HOUR_MS, HOUR_MS + 1])
    seal_all(broker)

    first = sensor.tick()
    same = sensor.tick()
    send("born", 2, born_at_ms=[2 * HOUR_MS, HOUR_MS + 7])
    seal_all(broker)
    second = sensor.tick()

    assert rows(first) == {"1970-01-01-00:00": 1, "1970-01-01-01:00": 2}
    assert all(values["bytes"] > 0 for _, values in first)
    assert same == []
    assert rows(second) == {"1970-01-01-01:00": 3, "1970-01-01-02:00": 1}


def test_a_property_may_be_the_time_and_what_has_none_is_left_out(
    broker: Broker, client: Client, resource: BrokerResource
) -> None:
    BY_PROPERTY.ensure(client)
    times = [{"at_ms": str(HOUR_MS)}, {"at_ms": "noon"}, {}, {"at_ms": "1"}]
    properties = pa.array([list(each.items()) for each in times], PROPERTIES)
    client.send("by_property", pa.table({"body": [b"x"] * 4, "properties": properties}))
    seal_all(broker)

    found = Sensor(resource, BY_PROPERTY).tick()

    assert rows(found) == {"1970-01-01-00:00": 1, "1970-01-01-01:00": 1}


def test_hours_off_the_grid_are_passed_over(
    broker: Broker, client: Client, send: Send, resource: BrokerResource
) -> None:
    BORN.ensure(client)
    send("born", 2, born_at_ms=[23 * HOUR_MS, 24 * HOUR_MS])
    seal_all(broker)

    assert rows(Sensor(resource, BORN).tick()) == {"1970-01-01-23:00": 1}


def test_many_hours_are_told_over_several_ticks(
    broker: Broker,
    client: Client,
    send: Send,
    resource: BrokerResource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rmq_pipeline.orchestration.topic_log.HOURS_PER_TICK", 4)
    BORN.ensure(client)
    send("born", 10, born_at_ms=[hour * HOUR_MS for hour in range(10)])
    seal_all(broker)
    sensor = Sensor(resource, BORN)

    ticks = [sensor.tick() for _ in range(4)]

    assert [len(each) for each in ticks] == [4, 4, 2, 0]
    assert len({partition for tick in ticks for partition, _ in tick}) == 10


def test_a_topic_made_again_begins_again(
    broker: Broker, client: Client, send: Send, resource: BrokerResource
) -> None:
    BORN.ensure(client)
    send("born", 1, born_at_ms=[0])
    seal_all(broker)
    sensor = Sensor(resource, BORN)
    sensor.tick()

    client.delete_topic("born", force=True)
    gone = sensor.tick()
    BORN.ensure(client)
    send("born", 2, born_at_ms=[HOUR_MS, HOUR_MS])
    seal_all(broker)

    assert gone == []
    assert rows(sensor.tick()) == {"1970-01-01-01:00": 2}


def test_a_broker_that_is_away_keeps_the_cursor(away: BrokerResource) -> None:
    sensor = Sensor(away, BORN)
    sensor.cursor = json.dumps({})

    assert sensor.tick() == []
    assert sensor.cursor == "{}"


def test_the_grid_grows_to_the_hour_under_way() -> None:
    grid = log_partitions(topic("growing", log_from="2026-01-01-00:00"))

    assert grid.get_first_partition_key() == "2026-01-01-00:00"
    assert grid.end_offset == 1
    assert log_key(BORN).to_user_string() == "topic_log/born"
