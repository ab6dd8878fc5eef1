"""``replay_<consumer>``: a range run of its asset with real Spark, and what it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.sink import read_sink
from rmq_pipeline.orchestration.consumer import Consumer, ConsumerConfig, spark_consumer
from rmq_pipeline.orchestration.declarations import topic
from rmq_pipeline.orchestration.replay import ReplayConfig, metadata, replay_asset
from rmq_pipeline.orchestration.resources import BrokerResource, SinkResource, local
from rmq_pipeline.orchestration.topic_log import log_spec
from rmq_pipeline.settings import Settings
from rmq_pipeline.spark.replay.plan import ReplayReport
from tests.broker.sealed_home import seal_all
from tests.spark.handlers import SINK, kept, shouted_alone

HOUR_MS = 3_600_000
WORDS = topic(
    "words",
    log_from="1970-01-01-00:00",
    log_until="1970-01-02-00:00",
)
Materialize = Callable[..., dg.ExecuteInProcessResult]


def consumer(handler: Any) -> Consumer:
    return spark_consumer(topic=WORDS, group="readers", sink="readers", sink_schema=SINK)(handler)


@pytest.fixture
def clock() -> Clock:
    return SystemClock()


@pytest.fixture
def broker(home: Path, clock: Clock) -> Iterator[Broker]:
    settings = Settings(reserve_bytes=1 << 20, log_file_bytes=1 << 20, seal_after_ms=0)
    with Broker.open(home, clock=clock, upkeep="none", settings=settings) as broker:
        yield broker


@pytest.fixture
def materialize(
    resource: BrokerResource, tmp_path: Path, instance: dg.DagsterInstance
) -> Materialize:
    """``materialize(asset, hours=None, config=None, tags=None)``: the run of an asset."""
    resources = {**local(), "broker": resource, "sinks": SinkResource(root=str(tmp_path))}

    def run(
        asset: dg.AssetsDefinition,
        hours: tuple[int, int] | None = None,
        config: dg.Config | None = None,
        tags: dict[str, str] | None = None,
    ) -> dg.ExecuteInProcessResult:
        chosen = dict(tags or {})
        if hours is not None:
            chosen["dagster/asset_partition_range_start"] = f"1970-01-01-{hours[0]:02}:00"
            chosen["dagster/asset_partition_range_end"] = f"1970-01-01-{hours[1]:02}:00"
        name = asset.op.name
        return dg.materialize(
            [asset, log_spec(WORDS)],
            resources=resources,
            run_config=dg.RunConfig(ops={name: config} if config else {}),
            tags=chosen,
            instance=instance,
            raise_on_error=False,
            selection=[asset],
        )

    return run


@pytest.fixture
def consumed(materialize: Materialize, client: Client, broker: Broker) -> Consumer:
    """Twelve messages of six hours, consumed and sealed."""
    made = consumer(kept)
    made.group.ensure(client)
    client.send(
        "words",
        pa.table(
            {
                "body": [f"word-{i}".encode() for i in range(12)],
                "born_at_ms": [i // 2 * HOUR_MS for i in range(12)],
                "tag": ["even" if i % 2 == 0 else "odd" for i in range(12)],
            }
        ),
    )
    assert materialize(made.asset, config=ConsumerConfig(idle_seconds=1)).success
    seal_all(broker)
    return made


def shown(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    """The metadata of the run's materializations, which all say the same."""
    assert result.success
    found = [
        {name: value.value for name, value in each.metadata.items()}
        for each in result.asset_materializations_for_node("replay_readers")
    ]
    return found[0]


def dry_found(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    """The metadata of a dry run, which materializes nothing."""
    assert result.success
    assert not result.asset_materializations_for_node("replay_readers")
    [event] = [event for event in result.all_events if event.is_asset_observation]
    found = event.asset_observation_data.asset_observation.metadata
    return {name: value.value for name, value in found.items()}


def bodies(root: Path, sink: str = "readers") -> list[str]:
    return sorted(row["body"].decode() for row in read_sink(root / sink).to_pylist())


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_hours_are_replayed_in_one_run(
    consumed: Consumer,
    materialize: Materialize,
    instance: dg.DagsterInstance,
    tmp_path: Path,
) -> None:
    fixed = replay_asset(consumer(shouted_alone))
    words = [f"word-{i}" for i in range(12)]

    dry = dry_found(materialize(fixed, (2, 3)))
    untouched = bodies(tmp_path)
    tags = {"dagster/backfill": "fix-1", "rmq/replay_mode": "replace"}
    replaced = materialize(fixed, (2, 3), tags=tags)
    again = shown(materialize(fixed, (2, 3), ReplayConfig(mode="replace"), tags))
    side = materialize(fixed, (0, 5), ReplayConfig(mode="side_sink", side_sink="side"))

    assert (dry["mode"], dry["messages"], dry["rows_added"], dry["rows_removed"]) == (
        "dry_run",
        4,
        4,
        4,
    )
    assert [record.data for record in dry["changed_partitions"].records] == [
        {"partition": "1970-01-01T02", "rows": 4},
        {"partition": "1970-01-01T03", "rows": 4},
    ]
    assert dry["later_partitions"] == "none"
    changed = [record.data for record in dry["rows_changed"].records]
    assert len(changed) == 8
    assert {each["change"]: each["row"] for each in changed if "4" in each["row"].lower()} == {
        "removed": f"body word-4, born_at_ms {2 * HOUR_MS}",
        "added": f"body WORD-4, born_at_ms {2 * HOUR_MS}",
    }
    assert untouched == sorted(words)
    assert len(replaced.asset_materializations_for_node("replay_readers")) == 2
    assert shown(replaced)["messages"] == 4
    assert shown(replaced)["replay_id"] == "fix-1"
    assert again["repeated"] is True
    assert bodies(tmp_path) == sorted(w.upper() if 4 <= i < 8 else w for i, w in enumerate(words))
    assert shown(side)["rows"] == 12
    assert bodies(tmp_path, "side") == sorted(w.upper() for w in words)
    observed = instance.fetch_observations(consumed.key, limit=1).records[0].asset_observation
    assert observed is not None
    assert observed.metadata["replay_id"].value == "fix-1"


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_dry_run_says_why_a_replacement_would_be_refused(
    consumed: Consumer, materialize: Materialize, client: Client
) -> None:
    client.alter_topic("words", partition_time="stored")
    config = ReplayConfig(mode="dry_run", side_sink="later", publish=True)

    dry = dry_found(materialize(replay_asset(consumed), (2, 3), config))

    assert "partitioned by born_at_ms, the topic by stored" in dry["replace_refused"]
    assert dry["messages"] == 0


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_messages_go_into_a_side_topic_once(
    consumed: Consumer, materialize: Materialize, client: Client, instance: dg.DagsterInstance
) -> None:
    asset = replay_asset(consumed)
    config = ReplayConfig(
        mode="side_topic", side_topic="again", filter="even", rate_per_s=50, ttl_ms=HOUR_MS
    )
    tags = {"dagster/backfill": "copy-1"}

    first = shown(materialize(asset, (0, 5), config, tags))
    second = shown(materialize(asset, (0, 5), config, tags))
    refused = materialize(asset, (0, 5), ReplayConfig(mode="side_topic", side_topic="words"))

    ran = instance.get_runs(limit=2)[1]
    inherited = {key: tag for key, tag in ran.tags.items() if key != "dagster/backfill"}
    reexecuted = shown(materialize(asset, (0, 5), config, inherited))

    assert (reexecuted["replay_id"], reexecuted["stored"]) == ("copy-1", 0)
    assert (first["messages"], first["wanted"], first["stored"]) == (12, 6, 6)
    assert (second["wanted"], second["stored"]) == (6, 0)
    assert not refused.success
    described = client.describe_topic("again")
    assert described["retention_ms"] == HOUR_MS
    found = [
        row
        for queue in described["offsets"]
        for row in client.read("again", queue["queue_id"], offset=0, limit=100).to_pylist()
    ]
    assert sorted(row["body"].decode() for row in found) == sorted(
        f"word-{i}" for i in range(0, 12, 2)
    )
    assert {row["tag"] for row in found} == {"even"}
    assert {row["born_at_ms"] for row in found} == {hour * HOUR_MS for hour in range(6)}


def test_a_mode_that_there_is_not_fails_at_once(materialize: Materialize, client: Client) -> None:
    made = consumer(kept)
    made.group.ensure(client)

    result = materialize(replay_asset(made), (0, 0), ReplayConfig(mode="redo"))

    [failure] = [event for event in result.all_events if event.is_step_failure]
    assert "mode must be one of" in failure.step_failure_data.error_display_string


def test_tags_say_what_the_form_says() -> None:
    tags = {"rmq/replay_mode": "replace", "rmq/replay_tries": "3", "other": "x"}

    config = ReplayConfig(parallelism=7).tagged(tags)

    assert (config.mode, config.tries, config.parallelism) == ("replace", 3, 7)
    assert all(field.description for field in ReplayConfig.model_fields.values())


def test_metadata_has_no_secrets_of_an_address() -> None:
    report = ReplayReport(
        replay_id="x",
        mode="replace",
        from_ms=0,
        to_ms=HOUR_MS,
        rows_report="s3://key:a/secret@bucket/rows.parquet",
    )

    assert metadata(report)["rows_report"] == "s3://***@bucket/rows.parquet"
    assert "outcomes_report" not in metadata(report)
