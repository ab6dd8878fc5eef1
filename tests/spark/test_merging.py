"""Spark merges segments where there is much to merge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.orchestration.upkeep_assets import compaction
from rmq_pipeline.orchestration.windows import run_upkeep_window
from rmq_pipeline.spark.merging import merge_all
from tests.broker.archive_home import (
    by_glob,
    by_manifest,
    everything,
    fill,
    kept,
    offsets_in,
    opened,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_spark_merges_what_is_large(home: Path, spark: SparkSession) -> None:
    with opened(home) as broker, FlightServer(broker) as server, Client(server.address) as client:
        fill(broker)
        before = everything(broker)
        job = compaction(lambda: spark, spark_bytes=1000)

        result = run_upkeep_window(client, job, owner="a run", seconds=60)

        assert result.slices[0].report["spark"] == 1
        assert result.total("compactions") >= 2
        assert everything(broker).equals(before)
        assert offsets_in(by_manifest(home)) == offsets_in(by_glob(home)) == kept(broker)


def test_nothing_to_merge_starts_nothing(spark: SparkSession) -> None:
    assert list(merge_all(spark, [])) == []
