"""Sinks are compacted by a run that a sensor starts when it is worth it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.errors import FencedError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling import sink, window_lease
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.lake import compaction
from rmq_pipeline.lake.readers import sink_table
from rmq_pipeline.orchestration import sink_compaction
from rmq_pipeline.orchestration.consumer import Consumer, spark_consumer
from rmq_pipeline.orchestration.declarations import topic
from rmq_pipeline.orchestration.resources import BrokerResource, SinkResource
from rmq_pipeline.orchestration.sink_compaction import CompactConfig
from rmq_pipeline.orchestration.upkeep_assets import WINDOW_TAG, op_name

NUMBERS = topic("numbers")
ROW = pa.schema([("n", pa.int64()), ("born_at_ms", pa.int64())])
QUIET_S = sink_compaction.CompactConfig().quiet_seconds


def handler(_: pa.Table, __: pa.Table) -> Outcome:
    """Nothing; its sink is filled by the tests."""
    return Outcome()


@pytest.fixture
def consumers(client: Client) -> list[Consumer]:
    """Two with a sink, of which one has no group yet, and one without."""
    counter, absent = (
        spark_consumer(topic=NUMBERS, group=name, sink=name, sink_schema=ROW)(handler)
        for name in ("counter", "absent")
    )
    bare = spark_consumer(topic=NUMBERS, group="bare")(handler)
    counter.group.ensure(client)
    return [counter, absent, bare]


def fill(client: Client, sinks: Path, count: int) -> None:
    """Settle this many files of one row."""
    for n in range(count):
        rows = pa.table([[n], [1_000]], schema=ROW)
        files = sink.stage(sinks / "counter", rows, partition_time="born_at_ms", epoch=1, batch=n)
        client.settle("counter", schema.OUTCOME.empty_table(), sink_files=files)


def tick(
    consumers: list[Consumer],
    resource: BrokerResource,
    sinks: Path,
    *,
    instance: dg.DagsterInstance,
    cursor: str | None = None,
) -> dg.SensorResult:
    job = sink_compaction.compact_sinks_job()
    sensor = sink_compaction.compact_sinks_sensor(consumers, job)
    context = dg.build_sensor_context(instance=instance, cursor=cursor)
    result = sensor(context, broker=resource, sinks=SinkResource(root=str(sinks)))
    assert isinstance(result, dg.SensorResult)
    return result


def keys(result: dg.SensorResult) -> list[str | None]:
    return [request.run_key for request in result.run_requests or []]


def compact(
    consumers: list[Consumer], resource: BrokerResource, sinks: Path, **config: Any
) -> dict[str, Any] | None:
    result = dg.materialize(
        [sink_compaction.compact_sinks_asset(consumers)],
        resources={"broker": resource, "sinks": SinkResource(root=str(sinks))},
        run_config=dg.RunConfig(ops={op_name(sink_compaction.NAME): CompactConfig(**config)}),
    )
    made = result.asset_materializations_for_node(op_name(sink_compaction.NAME))
    return {name: value.value for name, value in made[0].metadata.items()} if made else None


def test_a_run_compacts_every_sink(
    consumers: list[Consumer], client: Client, resource: BrokerResource, tmp_path: Path
) -> None:
    fill(client, tmp_path, 16)

    metadata = compact(consumers, resource, tmp_path)

    assert metadata is not None
    assert (metadata["merged_files"], metadata["made_files"], metadata["rows"]) == (16, 1, 16)
    assert [record.data["consumer_group"] for record in metadata["sinks"].records] == ["counter"]
    assert sink_table(tmp_path / "counter")["n"].to_pylist() == list(range(16))
    assert client.sink_files("counter").num_rows == 1


def test_a_run_yields_to_one_under_way(
    consumers: list[Consumer], client: Client, resource: BrokerResource, tmp_path: Path
) -> None:
    fill(client, tmp_path, 16)
    client.open_window(sink_compaction.WINDOW, owner="another", duration_ms=60_000)

    assert compact(consumers, resource, tmp_path) is None
    assert client.sink_files("counter").num_rows == 16


def test_a_run_keeps_its_window_however_long_it_takes(
    consumers: list[Consumer],
    client: Client,
    resource: BrokerResource,
    tmp_path: Path,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(client, tmp_path, 16)
    monkeypatch.setattr(window_lease, "LEASE_MS", 600)
    renewed = threading.Event()
    renew = Client.renew_window

    def noting(self: Client, name: str, *, epoch: int, duration_ms: int) -> dict[str, Any]:
        answer = renew(self, name, epoch=epoch, duration_ms=duration_ms)
        renewed.set()
        return answer

    def sweep_for_long(*_: Any, **__: Any) -> list[Path]:
        for _step in range(6):
            renewed.clear()
            assert renewed.wait(30)
            clock.advance(400)
        return []

    monkeypatch.setattr(Client, "renew_window", noting)
    monkeypatch.setattr(compaction, "sweep", sweep_for_long)

    metadata = compact(consumers, resource, tmp_path)

    assert metadata is not None
    assert metadata["made_files"] == 1
    opened = client.open_window(sink_compaction.WINDOW, owner="another", duration_ms=1_000)
    assert "yielded_to" not in opened


def test_a_run_whose_window_somebody_took_replaces_nothing(
    consumers: list[Consumer],
    client: Client,
    resource: BrokerResource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(client, tmp_path, 16)

    def taken(*_: Any, **__: Any) -> list[Path]:
        client.open_window(
            sink_compaction.WINDOW, owner="another", duration_ms=60_000, takeover=True
        )
        return []

    monkeypatch.setattr(compaction, "sweep", taken)

    with pytest.raises(FencedError):
        compact(consumers, resource, tmp_path)

    assert client.sink_files("counter").num_rows == 16


def test_replaced_files_go_when_their_grace_is_over(
    consumers: list[Consumer],
    client: Client,
    resource: BrokerResource,
    tmp_path: Path,
    clock: ManualClock,
) -> None:
    fill(client, tmp_path, 16)
    compact(consumers, resource, tmp_path)
    clock.advance(60_000)

    metadata = compact(consumers, resource, tmp_path, grace_seconds=60)

    assert metadata is not None
    assert metadata["deleted_files"] == 16
    assert len(list((tmp_path / "counter").glob("hour=*/*.parquet"))) == 1


def test_the_sensor_asks_for_nothing_when_nothing_is_there(
    consumers: list[Consumer],
    resource: BrokerResource,
    instance: dg.DagsterInstance,
    tmp_path: Path,
) -> None:
    assert not tick(consumers, resource, tmp_path, instance=instance).run_requests


def test_the_sensor_leaves_a_few_files_until_the_hour_is_quiet(
    consumers: list[Consumer],
    client: Client,
    resource: BrokerResource,
    instance: dg.DagsterInstance,
    tmp_path: Path,
    clock: ManualClock,
) -> None:
    fill(client, tmp_path, 2)
    before = tick(consumers, resource, tmp_path, instance=instance)
    clock.advance(int(QUIET_S * 1000))

    after = tick(consumers, resource, tmp_path, instance=instance)

    assert not before.run_requests
    assert keys(after) == [f"compact_sinks/{clock.now_ms()}"]


def test_the_same_tick_twice_asks_for_the_same_run(
    consumers: list[Consumer],
    client: Client,
    resource: BrokerResource,
    instance: dg.DagsterInstance,
    tmp_path: Path,
) -> None:
    fill(client, tmp_path, 16)

    first, again = (
        tick(consumers, resource, tmp_path, instance=instance, cursor="4") for _ in range(2)
    )

    assert len(keys(first)) == 1
    assert (keys(first), first.cursor) == (keys(again), again.cursor)


def test_the_sensor_that_was_reset_asks_with_a_key_never_used_before(
    consumers: list[Consumer],
    client: Client,
    resource: BrokerResource,
    instance: dg.DagsterInstance,
    tmp_path: Path,
    clock: ManualClock,
) -> None:
    fill(client, tmp_path, 16)
    cursor: str | None = "4"
    used: list[str | None] = [f"{sink_compaction.NAME}/{serial}" for serial in range(1, 5)]
    for _ in range(3):
        result = tick(consumers, resource, tmp_path, instance=instance, cursor=cursor)
        used += keys(result)
        cursor = result.cursor
        clock.advance(30_000)

    reset = tick(consumers, resource, tmp_path, instance=instance)

    assert len(set(used)) == 7
    assert keys(reset)
    assert not set(keys(reset)) & set(used)


def test_the_sensor_waits_for_a_run_under_way(
    consumers: list[Consumer],
    client: Client,
    resource: BrokerResource,
    instance: dg.DagsterInstance,
    tmp_path: Path,
) -> None:
    fill(client, tmp_path, 16)
    instance.create_run_for_job(
        dg.Definitions(
            assets=[sink_compaction.compact_sinks_asset(consumers)],
            jobs=[sink_compaction.compact_sinks_job()],
            resources={"broker": resource, "sinks": SinkResource(root=str(tmp_path))},
        ).resolve_job_def(sink_compaction.NAME),
        status=dg.DagsterRunStatus.STARTED,
        tags={WINDOW_TAG: sink_compaction.NAME},
    )

    assert not tick(consumers, resource, tmp_path, instance=instance).run_requests


def test_the_sensor_skips_while_the_broker_is_away(
    consumers: list[Consumer],
    away: BrokerResource,
    instance: dg.DagsterInstance,
    tmp_path: Path,
) -> None:
    (tmp_path / "counter").mkdir()

    assert tick(consumers, away, tmp_path, instance=instance).skip_reason
