"""Declared consumers, of either engine: what is made of a handler, and one window of it."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from dagster_pyspark import LazyPySparkResource

from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.sink import read_sink
from rmq_pipeline.orchestration.consumer import (
    Consumer,
    ConsumerConfig,
    Declaration,
    python_consumer,
    spark_consumer,
)
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.orchestration.resources import BrokerResource, SinkResource, local
from rmq_pipeline.orchestration.sensors import consumers_sensor
from rmq_pipeline.orchestration.upkeep_assets import WINDOW_TAG
from tests.orchestration import counting
from tests.orchestration.conftest import Send
from tests.orchestration.counting import NUMBERS, SQUARES, STATE, declared, handler, window

ENGINES = {"pyspark": spark_consumer, "python": python_consumer}


@pytest.fixture
def clock() -> Clock:
    return SystemClock()


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def decorator(engine: str) -> type[Declaration]:
    return ENGINES[engine]


@pytest.fixture
def consumer(decorator: type[Declaration]) -> Consumer:
    return declared(decorator)(handler)


def of_engine(engine: str, *, spark: LazyPySparkResource) -> dict[str, Any]:
    """Resources that only this engine asks for."""
    return {"spark": spark} if engine == "pyspark" else {}


def raising_line() -> int:
    """The line of the file in which the counting handler raises."""
    lines, first = inspect.getsourcelines(handler)
    (at,) = [n for n, line in enumerate(lines, first) if 'ValueError("a bad message")' in line]
    return at


def test_decorator_takes_the_handlers_words(consumer: Consumer, engine: str) -> None:
    spec = consumer.asset.specs_by_key[dg.AssetKey("counter")]

    assert spec.description == "Number the messages of a group."
    assert spec.kinds == {"rocketmq", engine, "parquet"}
    assert consumer.group.order == "message_group"
    assert {check.name for checks in consumer.checks for check in checks.check_specs} == {
        "order",
        "no_loss",
        "oldest_unread",
        "dead_letters",
        "one_filter",
    }


def test_runs_have_the_tags_that_limit_them(consumer: Consumer, engine: str) -> None:
    own = {"pyspark": "rmq/spark", "python": "rmq/python"}[engine]

    assert set(consumer.job.tags) == {WINDOW_TAG, own, dg.MAX_RUNTIME_SECONDS_TAG}


def test_state_without_order_is_refused(decorator: type[Declaration]) -> None:
    with pytest.raises(ValueError, match="order_by"):
        declared(decorator, order_by=None, state=STATE)(handler)


def test_pipeline_makes_topics_and_groups(consumer: Consumer, client: Client) -> None:
    pipeline = Pipeline("sums", topics=[NUMBERS, SQUARES], consumers=[consumer])

    pipeline.ensure(client)
    pipeline.ensure(client)

    assert client.describe_topic("squares")["type"] == "normal"
    assert client.describe_group("counter")["max_attempts"] == 2


def test_sensor_starts_a_window_when_there_are_messages(
    consumer: Consumer, client: Client, resource: BrokerResource, send: Send, engine: str
) -> None:
    consumer.group.ensure(client)
    send("numbers", 1, message_group=["a"])

    sensor = consumers_sensor([consumer], name="sums_consumers")
    resources = of_engine(engine, spark=LazyPySparkResource(spark_config={}))

    with (
        dg.DagsterInstance.ephemeral() as instance,
        dg.build_sensor_context(
            instance=instance, resources={"broker": resource, **resources}
        ) as context,
    ):
        result = sensor(context)

    assert isinstance(result, dg.SensorResult)
    assert result.run_requests is not None
    assert [request.job_name for request in result.run_requests] == ["counter_window"]


def test_window_that_is_taken_yields_without_a_session(
    consumer: Consumer, client: Client, resource: BrokerResource, tmp_path: Path, engine: str
) -> None:
    consumer.group.ensure(client)
    client.open_window("consumer/counter", owner="the other run", duration_ms=60_000)
    resources = of_engine(engine, spark=LazyPySparkResource(spark_config={}))

    metadata = window(consumer, resource, tmp_path, **resources)

    assert metadata == {"yielded_to": "the other run"}


@pytest.mark.parametrize(
    "engine",
    [pytest.param("pyspark", marks=[pytest.mark.spark, pytest.mark.slow]), "python"],
    indirect=True,
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_window_counts_observes_and_draws(
    consumer: Consumer,
    client: Client,
    resource: BrokerResource,
    send: Send,
    tmp_path: Path,
    engine: str,
) -> None:
    consumer.group.ensure(client)
    for _ in range(3):
        send("numbers", 4, message_group=["a", "b", "a", "b"], born_at_ms=[1_000] * 4)
    client.send("numbers", pa.table({"body": [b"bad"], "message_group": ["c"]}))
    resources = of_engine(engine, spark=local()["spark"])

    metadata = window(consumer, resource, tmp_path, **resources)

    rows = read_sink(tmp_path / "counter")
    assert sorted(rows["number"].to_pylist()) == sorted([*range(1, 7), *range(1, 7)])
    assert metadata["acked"] == 12
    assert metadata["rows"] == 12
    assert metadata["published"] == {"squares": 12}
    assert metadata["retried"] + metadata["dead_lettered"] == 2
    # Numbers, because Dagster plots nothing else.
    counts = {"published_messages": 12, "failures": 2, "lag": 0, "dead_letters": 1}
    assert {name: metadata[name] for name in counts} == counts
    assert metadata["messages_per_second"] > 0
    assert metadata["oldest_waited_seconds"] == 0
    plotted = (*counts, "messages_per_second", "oldest_waited_seconds")
    assert all(isinstance(metadata[name], int | float) for name in plotted)
    assert "data:image/svg+xml;base64," in metadata["chart"]
    assert client.due()["groups"]["counter"]["window"] is None


@pytest.mark.parametrize(
    "engine",
    [pytest.param("pyspark", marks=[pytest.mark.spark, pytest.mark.slow]), "python"],
    indirect=True,
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_traceback_of_a_handler_is_logged_once_and_kept_with_the_delivery(
    decorator: type[Declaration],
    client: Client,
    resource: BrokerResource,
    tmp_path: Path,
    engine: str,
) -> None:
    consumer = declared(decorator, backoff_ms=[600_000])(handler)
    consumer.group.ensure(client)
    client.send(
        "numbers",
        pa.table({"body": [b"bad"] * 3, "message_group": ["a", "b", "c"]}),
    )
    resources = of_engine(engine, spark=local()["spark"])

    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize(
            [consumer.asset],
            instance=instance,
            resources={"broker": resource, "sinks": SinkResource(root=str(tmp_path)), **resources},
            run_config=dg.RunConfig(
                ops={"counter": ConsumerConfig(idle_seconds=1.0, parallelism=1)}
            ),
        )
        logged = [
            entry for entry in instance.all_logs(result.run_id) if "failed" in entry.user_message
        ]

    (entry,) = [each for each in logged if "Traceback" in each.user_message]
    told = entry.user_message
    assert (entry.level, entry.step_key) == (logging.ERROR, "counter")
    head, first, frame, raising, *marks, last = told.splitlines()
    assert "the first of signature" in head
    assert first == "Traceback (most recent call last):"
    assert frame == f'  File "{counting.__file__}", line {raising_line()}, in handler'
    assert raising.strip() == 'raise ValueError("a bad message")'
    assert not "".join(marks).strip(" ^~")
    assert last == "ValueError: a bad message"
    kept = client.sql("SELECT reason, traceback FROM retrying").to_pylist()
    assert [each["reason"] for each in kept] == ["ValueError: a bad message"] * 3
    (where,) = [each["traceback"] for each in kept if each["traceback"]]
    assert told == f"{head}\n{where}"
