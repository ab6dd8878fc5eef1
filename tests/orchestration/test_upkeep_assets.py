"""Sealing, merging and expiry as assets: what they did, and what is in the archive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import dagster as dg
import pyarrow.dataset as ds
import pytest
from dagster_pyspark import LazyPySparkResource

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.due_work import Memory, wanted_upkeep
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.upkeep_assets import archive_assets, asset_key, compaction, op_name
from rmq_pipeline.orchestration.windows import JOBS, Report
from tests.broker.archive_home import (
    HOUR_MS,
    by_glob,
    by_manifest,
    everything,
    fill,
    kept,
    offsets_in,
    opened,
)
from tests.broker.sealed_home import messages


@pytest.fixture
def broker(home: Path, clock: ManualClock) -> Iterator[Broker]:
    with opened(home, clock) as broker:
        yield broker


def materialize(resource: BrokerResource, job: str) -> dict[str, Any]:
    """The metadata of a run of one of the assets."""
    result = dg.materialize(
        archive_assets(),
        selection=dg.AssetSelection.assets(asset_key(job)),
        resources={"broker": resource, "spark": LazyPySparkResource(spark_config={})},
    )
    assert result.success
    (event,) = result.asset_materializations_for_node(op_name(job))
    return {name: _plain(value) for name, value in event.metadata.items()}


def _plain(value: dg.MetadataValue[Any]) -> Any:
    if isinstance(value, dg.TableMetadataValue):
        return [dict(record.data) for record in value.records]
    return value.value


def test_sealing_says_what_is_in_the_archive(broker: Broker, resource: BrokerResource) -> None:
    broker.create_topic("t", queues=2)
    broker.send("t", messages(100, body_bytes=1000))
    broker.create_group("readers")
    broker.ack(broker.receive("readers", "t", limit=3)["receipt_handle"].to_pylist())

    found = materialize(resource, "seal")

    (size,) = broker.sql("SELECT sum(bytes)::BIGINT AS n FROM segments")["n"].to_pylist()
    assert (found["segments"], found["rows"], found["bytes"]) == (2, 100, size)
    assert found["ratio"] == round(size / found["raw_bytes"], 4)
    assert 100 * 1000 < found["raw_bytes"] < 150 * 1000
    assert (found["archive_files"], found["archive_rows"]) == (2, 100)
    assert found["archive_bytes"] == size
    # What happened to three messages, delivered and settled.
    assert found["history_event_rows"] == found["event_rows"] >= 6
    assert found["topics"] == [{"topic": "t", "files": 2, "rows": 100, "bytes": size}]


def test_the_archive_shows_its_columns(home: Path, broker: Broker) -> None:
    fill(broker, turns=1)
    metadata = archive_assets()[0].metadata_by_key[asset_key("seal")]

    columns = {column.name: column.type for column in metadata["dagster/column_schema"].columns}

    (path, *_) = by_glob(home)
    stored = ds.dataset(path.parents[1], partitioning="hive").schema
    assert list(columns) == ["queue_id", *(name for name in stored.names if name != "queue_id")]
    assert columns["stored_at_ms"] == str(stored.field("stored_at_ms").type)


def test_merging_says_what_became_of_what(
    broker: Broker, resource: BrokerResource, home: Path
) -> None:
    fill(broker)
    before = everything(broker)

    found = materialize(resource, "compact")

    assert found["compactions"] >= 2
    assert found["inputs"] > 10
    assert 0 < found["bytes"] < found["bytes_before"] * 1.1
    assert found["archive_files"] == len(by_manifest(home)) < 24
    assert everything(broker).equals(before)
    assert offsets_in(by_manifest(home)) == offsets_in(by_glob(home)) == kept(broker)


@pytest.mark.parametrize(("shares_files", "starts"), [(True, 1), (False, 0)])
def test_what_is_much_is_merged_without_spark_where_it_does_not_start_or_cannot_read(
    broker: Broker, client: Client, shares_files: bool, starts: int
) -> None:
    fill(broker)
    before, asked = everything(broker), []

    def no_java() -> NoReturn:
        asked.append(1)
        raise RuntimeError("Java gateway process exited before sending its port number.")

    job = compaction(no_java, spark_bytes=1, shares_files=shares_files)
    epoch = client.open_window(job.window, owner="test", duration_ms=60_000)["epoch"]
    reports: list[Report] = []
    while not reports or job.work_of(reports[-1]):
        reports.append(job.call(client, wait_ms=0, window=(job.window, epoch)))

    assert len(asked) == starts
    assert not any(report["spark"] for report in reports)
    assert sum(report["compactions"] for report in reports) >= 2
    assert client.compact()["compactions"] == 0
    assert everything(broker).equals(before)


def test_expiry_says_what_went(
    broker: Broker, resource: BrokerResource, clock: ManualClock
) -> None:
    fill(broker)
    broker.alter_topic("t", retention_ms=5 * HOUR_MS)

    found = materialize(resource, "expire")

    assert (found["segments"], found["rows"], found["archive_rows"]) == (16, 320, 160)
    clock.advance(60_000)
    assert materialize(resource, "expire")["deleted_files"] == 16


def test_windows_are_asked_for_when_there_is_something_to_do(
    broker: Broker, client: Client, clock: ManualClock
) -> None:
    jobs = {name: JOBS[name] for name in ("compact", "expire")}
    memory = Memory()

    def wanted() -> list[str]:
        clock.advance(120_000)
        return [each.name for each in wanted_upkeep(client.due(), jobs, memory=memory)]

    broker.create_topic("t", queues=1)
    assert wanted() == []
    fill(broker, turns=4, queues=1)
    assert wanted() == ["compact"]
    client.compact()
    assert wanted() == ["expire"]  # the replaced files
    client.expire()
    assert wanted() == []
    client.alter_topic("t", retention_ms=100 * HOUR_MS)
    due = client.due()["jobs"]["expire"]
    assert due["due"] == 0
    clock.advance(200 * HOUR_MS)
    assert client.due()["jobs"]["expire"]["due"] == 1
    assert wanted() == ["expire"]
    client.expire()
    clock.advance(120_000)
    client.expire()
    assert wanted() == []


def test_what_is_held_back_is_not_asked_for_again_and_again(
    broker: Broker, client: Client, clock: ManualClock
) -> None:
    fill(broker, turns=1, queues=1)
    broker.create_group("g")
    broker.receive("g", "t", limit=1, invisible_duration_ms=12 * HOUR_MS)
    client.alter_topic("t", retention_ms=1000)
    clock.advance(60_000)
    assert client.due()["jobs"]["expire"]["due"] == 1

    assert client.expire()["held_back"] == 1

    assert client.due()["jobs"]["expire"]["due"] == 0
    clock.advance(10 * 60_000)
    assert client.due()["jobs"]["expire"]["due"] == 1
