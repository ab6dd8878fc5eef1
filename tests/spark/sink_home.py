"""A broker whose consumers have sinks, and what is in these."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from rmq_pipeline.broker import Broker
from rmq_pipeline.lake import readers
from rmq_pipeline.settings import Settings
from rmq_pipeline.spark.consumer import ConsumerSpec, run_window
from tests.spark.handlers import SINK, placed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC, GROUP = "steps", "walkers"


def opened(home: Path) -> Broker:
    settings = Settings(reserve_bytes=1024 * 1024)
    broker = Broker.open(home, upkeep="none", settings=settings)
    broker.create_topic(TOPIC, queues=2)
    broker.create_group(GROUP)
    return broker


def send(broker: Broker, *bodies: bytes) -> None:
    columns = {"body": list(bodies), "born_at_ms": [0] * len(bodies)}
    broker.send(TOPIC, pa.table(columns))


def bodies_in(folder: Path) -> list[bytes]:
    return sorted(readers.sink_table(folder, columns=["body"])["body"].to_pylist())


def on_disk(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.glob("hour=*/*.parquet")}


def counting(broker: Broker, group: str = GROUP) -> set[str]:
    return set(broker.sink_files(group)["path"].to_pylist())


def next_window(broker: Broker, folder: Path, group: str = GROUP) -> int:
    """A window that finds nothing to do; how many files it swept."""

    def no_spark() -> SparkSession:
        raise AssertionError("there is nothing to do")

    report = run_window(spec(folder, group), broker, spark=no_spark, owner="next", idle_s=0.1)
    assert report.ended == "idle"
    return report.swept_files


def spec(folder: Path, group: str = GROUP) -> ConsumerSpec:
    return ConsumerSpec(
        name=group,
        topic=TOPIC if group == GROUP else group,
        group=group,
        handler=placed,
        sink=folder,
        sink_schema=SINK,
        sink_offsets=True,
    )
