"""Replays of a sink in a bucket: their scratch files and reports lie there, too."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from rmq_pipeline.broker import Broker
from rmq_pipeline.lake.readers import spark_frame
from rmq_pipeline.storage.place import at
from rmq_pipeline.storage.root import below, split
from tests.broker.sealed_home import seal_all
from tests.object_store import ObjectStore
from tests.spark.handlers import shouted
from tests.spark.replayed import Consumer, replayed_broker

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with replayed_broker(tmp_path / "home") as broker:
        yield broker


@pytest.fixture
def place(object_store: ObjectStore, request: pytest.FixtureRequest) -> Iterator[str]:
    # The workers of the session may be older than the environment of the store.
    folder = object_store.address(request.node.name)
    yield folder
    left = [path for path in at(folder).files("") if "/replay-" in path or "_handoff/" in path]
    assert not [path for path in left if not path.startswith(("sink/hour=", "side/hour="))]


@pytest.fixture
def consumer(broker: Broker, place: str, spark: SparkSession) -> Consumer:
    """Six messages of three groups in each of two hours; the second hour is not sealed."""
    consumer = Consumer(broker, cast(Path, place), spark)
    for hour in range(2):
        consumer.send(*(f"h{hour}-{i}" for i in range(6)), hour=hour)
        consumer.consume()
        if not hour:
            seal_all(broker)
    return consumer


def test_a_range_of_a_bucket_is_replaced(consumer: Consumer) -> None:
    report = consumer.again(1, 2, handler=shouted)

    assert report.messages == report.rows == 6
    bodies = sorted(body for _, _, body in consumer.rows())
    assert bodies == [f"H1-{i}" for i in range(6)] + [f"h0-{i}" for i in range(6)]


def test_a_dry_run_reports_into_the_bucket(consumer: Consumer) -> None:
    before = consumer.files()

    report = consumer.again(0, 2, handler=shouted, mode="dry_run")

    assert (report.rows_added, report.rows_removed) == (12, 12)
    assert consumer.files() == before
    folder, name = split(report.rows_report)
    with at(folder).open(name) as file:
        assert pq.read_table(file).num_rows == 24


def test_a_side_sink_of_a_bucket_is_filled_again(consumer: Consumer, spark: SparkSession) -> None:
    side = below(consumer.folder, "side")
    settings: dict[str, Any] = {"mode": "side_sink", "side_sink": side, "handler": shouted}

    consumer.again(0, 2, **settings)
    again = consumer.again(0, 2, **settings)

    assert again.replaced_files > 0
    assert len(consumer.rows("side")) == 12
    assert spark_frame(spark, side).count() == 12
