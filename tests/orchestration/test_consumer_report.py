"""The hours of a sink as partitions of an asset: which a window fills, with which rows."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.sink import sink_files
from rmq_pipeline.orchestration import consumer_report
from rmq_pipeline.orchestration.consumer import Consumer, ConsumerConfig, python_consumer
from rmq_pipeline.orchestration.declarations import topic
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.orchestration.resources import BrokerResource, SinkResource, local
from tests.orchestration import counting
from tests.orchestration.conftest import Send

HOUR_MS = 3_600_000
NUMBERS = topic("numbers", type="fifo", log_from="1970-01-01-00:00", log_until="1970-01-01-05:00")
KEY = consumer_report.hours_key("counter")


@pytest.fixture
def clock() -> Clock:
    return SystemClock()


@pytest.fixture
def consumer(client: Client) -> Consumer:
    made = counting.declared(python_consumer, topic=NUMBERS)(counting.handler)
    made.group.ensure(client)
    return made


def window(
    consumer: Consumer, instance: dg.DagsterInstance, resource: BrokerResource, root: Path
) -> list[tuple[str, int]]:
    """Run one; the hours that it reported, with their rows."""
    result = dg.materialize(
        [consumer.asset],
        instance=instance,
        resources={"broker": resource, "sinks": SinkResource(root=str(root))},
        run_config=dg.RunConfig(ops={"counter": ConsumerConfig(idle_seconds=0.3)}),
    )
    found = result.asset_materializations_for_node("counter")
    return sorted(
        (str(each.partition), int(str(each.metadata["rows"].value)))
        for each in found
        if each.asset_key == KEY
    )


def test_a_window_fills_the_hours_that_it_has_changed(
    consumer: Consumer,
    instance: dg.DagsterInstance,
    resource: BrokerResource,
    send: Send,
    tmp_path: Path,
) -> None:
    send("numbers", 3, message_group=list("aab"), born_at_ms=[0, 0, HOUR_MS])
    first = window(consumer, instance, resource, tmp_path)
    send("numbers", 2, message_group=list("ab"), born_at_ms=[HOUR_MS, 9 * HOUR_MS])
    second = window(consumer, instance, resource, tmp_path)
    nothing = window(consumer, instance, resource, tmp_path)

    assert first == [("1970-01-01-00:00", 2), ("1970-01-01-01:00", 1)]
    # The last hour is not on the grid of the topic.
    assert second == [("1970-01-01-01:00", 2)]
    assert nothing == []
    assert instance.get_materialized_partitions(KEY) == {"1970-01-01-00:00", "1970-01-01-01:00"}
    assert sink_files(tmp_path / "counter").num_rows == 4


def test_hours_that_a_dead_window_has_not_reported_are_reported_by_the_next(
    consumer: Consumer,
    instance: dg.DagsterInstance,
    resource: BrokerResource,
    send: Send,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send("numbers", 1, message_group=["a"], born_at_ms=[0])
    with monkeypatch.context() as dying:
        dying.setattr(consumer_report, "report_sink_hours", lambda *_, **__: 0)
        assert window(consumer, instance, resource, tmp_path) == []
    send("numbers", 1, message_group=["a"], born_at_ms=[HOUR_MS])

    assert window(consumer, instance, resource, tmp_path) == [
        ("1970-01-01-00:00", 1),
        ("1970-01-01-01:00", 1),
    ]


def test_a_sinks_hours_are_an_asset_behind_its_consumer(consumer: Consumer) -> None:
    pipeline = Pipeline("counting", topics=[NUMBERS, counting.SQUARES], consumers=[consumer])

    defs = dg.Definitions.merge(pipeline.definitions(), dg.Definitions(resources=local()))
    graph = defs.resolve_asset_graph()

    node = graph.get(KEY)
    assert node.parent_keys == {consumer.key}
    assert node.partitions_def is not None
    assert node.partitions_def.get_num_partitions() == 5
