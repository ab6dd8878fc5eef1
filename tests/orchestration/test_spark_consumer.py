"""``@spark_consumer``: what it makes of a handler, and one window of it with real Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from dagster_pyspark import LazyPySparkResource

from resources.deployments import local
from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.broker_resource import BrokerResource
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.orchestration.sink_resource import SinkResource
from rmq_pipeline.orchestration.spark_consumer import (
    ConsumerConfig,
    SparkConsumer,
    spark_consumer,
)
from rmq_pipeline.orchestration.topic_assets import topic
from rmq_pipeline.spark.handler import Outcome
from rmq_pipeline.spark.sink import read_sink
from tests.orchestration.conftest import Send

NUMBERS = topic("numbers", type="fifo")
SQUARES = topic("squares")
STATE = pa.schema([("seen", pa.int64())])
COUNT = pa.schema(
    [("message_group", pa.string()), ("number", pa.int64()), ("born_at_ms", pa.int64())]
)


def handler(messages: pa.Table, state: pa.Table) -> Outcome:
    """Number the messages of a group."""
    seen = state["seen"][0].as_py() if state.num_rows else 0
    n = messages.num_rows
    group = messages["message_group"]
    if messages["body"][0].as_py() == b"bad":
        raise ValueError("a bad message")
    numbers = pa.array(range(seen + 1, seen + n + 1), pa.int64())
    return Outcome(
        rows=pa.table([group, numbers, messages["born_at_ms"]], schema=COUNT),
        state=pa.table([pa.array([seen + n], pa.int64())], schema=STATE),
        publish={"squares": pa.table({"body": messages["body"]})},
    )


@pytest.fixture
def clock() -> Clock:
    return SystemClock()


@pytest.fixture
def consumer() -> SparkConsumer:
    return spark_consumer(
        topic=NUMBERS,
        group="counter",
        order_by="message_group",
        state=STATE,
        sink="counter",
        sink_schema=COUNT,
        publishes=[SQUARES],
        max_attempts=2,
        backoff_ms=[1],
    )(handler)


def test_decorator_takes_the_handlers_words(consumer: SparkConsumer) -> None:
    spec = consumer.asset.specs_by_key[dg.AssetKey("counter")]

    assert spec.description == "Number the messages of a group."
    assert {"rocketmq", "pyspark", "parquet"} <= spec.kinds
    assert consumer.group.order == "message_group"
    assert {check.name for checks in consumer.checks for check in checks.check_specs} == {
        "order",
        "no_loss",
        "oldest_unread",
        "dead_letters",
    }


def test_state_without_order_is_refused() -> None:
    with pytest.raises(ValueError, match="order_by"):
        spark_consumer(topic=NUMBERS, group="counter", state=STATE)(handler)


def test_pipeline_makes_topics_and_groups(consumer: SparkConsumer, client: Client) -> None:
    pipeline = Pipeline("sums", topics=[NUMBERS, SQUARES], consumers=[consumer])

    pipeline.ensure(client)
    pipeline.ensure(client)

    assert client.describe_topic("squares")["type"] == "normal"
    assert client.describe_group("counter")["max_attempts"] == 2


def test_window_that_is_taken_yields_without_a_session(
    consumer: SparkConsumer, client: Client, resource: BrokerResource, tmp_path: Path
) -> None:
    consumer.group.ensure(client)
    client.open_window("consumer/counter", owner="the other run", duration_ms=60_000)

    metadata = window(consumer, resource, tmp_path, spark=LazyPySparkResource(spark_config={}))

    assert metadata == {"yielded_to": "the other run"}


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_window_counts_observes_and_draws(
    consumer: SparkConsumer, client: Client, resource: BrokerResource, send: Send, tmp_path: Path
) -> None:
    consumer.group.ensure(client)
    for _ in range(3):
        send("numbers", 4, message_group=["a", "b", "a", "b"], born_at_ms=[1_000] * 4)
    client.send("numbers", pa.table({"body": [b"bad"], "message_group": ["c"]}))

    metadata = window(consumer, resource, tmp_path, spark=local()["spark"])

    rows = read_sink(tmp_path / "counter")
    assert sorted(rows["number"].to_pylist()) == sorted([*range(1, 7), *range(1, 7)])
    assert metadata["acked"] == 12
    assert metadata["rows"] == 12
    assert metadata["published"] == {"squares": 12}
    assert metadata["retried"] + metadata["dead_lettered"] == 2
    assert "data:image/svg+xml;base64," in metadata["chart"]
    assert client.due()["groups"]["counter"]["window"] is None


def window(
    consumer: SparkConsumer, resource: BrokerResource, root: Path, *, spark: LazyPySparkResource
) -> dict[str, Any]:
    result = dg.materialize(
        [consumer.asset, *consumer.checks],
        resources={"broker": resource, "sinks": SinkResource(root=str(root)), "spark": spark},
        run_config=dg.RunConfig(ops={"counter": ConsumerConfig(idle_seconds=3)}),
    )
    assert all(
        check.severity == dg.AssetCheckSeverity.WARN or check.passed
        for check in result.get_asset_check_evaluations()
    )
    events = [
        event.asset_observation_data.asset_observation
        for event in result.all_events
        if event.event_type == dg.DagsterEventType.ASSET_OBSERVATION
    ] + [*result.asset_materializations_for_node("counter")]
    return {name: value.value for name, value in events[-1].metadata.items()}
