"""What a Spark consumer with a filter is given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.handling import sink
from rmq_pipeline.settings import Settings
from rmq_pipeline.spark.consumer import ConsumerSpec, run_window
from tests.spark.handlers import SINK, kept

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def consumer(folder: Path, **changes: Any) -> ConsumerSpec:
    settings: dict[str, Any] = {
        "name": "western",
        "topic": "steps",
        "group": "western",
        "handler": kept,
        "sink": folder / "sink",
        "sink_schema": SINK,
    }
    return ConsumerSpec(**{**settings, **changes})


@pytest.mark.spark
def test_a_window_handles_what_its_condition_is_true_for_and_passes_the_rest(
    tmp_path: Path, spark: SparkSession
) -> None:
    settings = Settings(reserve_bytes=1024 * 1024)
    spec = consumer(tmp_path, filter="region STARTSWITH 'w' AND a >= 10", filter_type="sql92")
    with Broker.open(tmp_path / "home", upkeep="none", settings=settings) as broker:
        broker.create_topic("steps", queues=3)
        broker.create_group("western")
        properties = [[("a", str(i)), ("region", ["west", "east"][i % 2])] for i in range(20)]
        kind = pa.map_(pa.string(), pa.string())
        broker.send(
            "steps",
            pa.table({"body": [b"%d" % i for i in range(20)]}).append_column(
                "properties", pa.array(properties, kind)
            ),
        )

        report = run_window(spec, broker, spark=lambda: spark, owner="test", idle_s=0.2)
        left = broker.receive("western", "steps", limit=100).num_rows

    handled = sink.read_sink(tmp_path / "sink")["body"].to_pylist()
    assert sorted(handled) == [b"10", b"12", b"14", b"16", b"18"]
    assert report.acked == 5
    assert left == 0


def test_a_consumer_whose_filter_does_not_parse_is_no_consumer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"western.*at character 10"):
        consumer(tmp_path, filter="region = = 'w'", filter_type="sql92")
