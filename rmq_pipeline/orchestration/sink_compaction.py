"""Compaction of consumers' sinks: a run merges small files, and a sensor starts it when needed."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

import dagster as dg

from rmq_pipeline.errors import BusyError, NotFoundError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.window_lease import WindowLease
from rmq_pipeline.lake import compaction
from rmq_pipeline.limits import MIB
from rmq_pipeline.orchestration.backoff import Backoff, skip_reason
from rmq_pipeline.orchestration.consumer import Consumer
from rmq_pipeline.orchestration.declarations import KIND
from rmq_pipeline.orchestration.due_work import next_serial
from rmq_pipeline.orchestration.resources import BrokerResource, SinkResource
from rmq_pipeline.orchestration.sensors import CONNECT_RETRY_S
from rmq_pipeline.orchestration.upkeep_assets import (
    GROUP,
    WINDOW_TAG,
    asset_key,
    say_yielded,
    window_tags,
)
from rmq_pipeline.storage.place import at
from rmq_pipeline.storage.root import Address

NAME: Final = "compact_sinks"
WINDOW: Final = f"{GROUP}/{NAME}"
#: Interval of the sensor.
LOOK_EVERY_S: Final = 60
_UNDER_WAY: Final = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
)


class CompactConfig(dg.Config):
    """Settings of a compaction."""

    #: Approximate size of a merged file.
    target_mib: int = 128
    #: Minimum number of files of similar size to merge in an hour that still gets files.
    least_files: int = compaction.DEFAULT.least_files
    #: An hour without a new file for this long is quiet, and is merged completely.
    quiet_seconds: float = compaction.DEFAULT.quiet_ms / 1000
    #: Replaced files are kept this long for readers that still use them.
    grace_seconds: float = compaction.DEFAULT.grace_ms / 1000

    def rules(self) -> compaction.Rules:
        """Return the rules of the compaction."""
        return compaction.Rules(
            target_bytes=self.target_mib * MIB,
            least_files=self.least_files,
            quiet_ms=int(self.quiet_seconds * 1000),
            grace_ms=int(self.grace_seconds * 1000),
        )


def compact_sinks_asset(consumers: Sequence[Consumer]) -> dg.AssetsDefinition:
    """Return the asset whose run compacts the sinks of these consumers."""

    @dg.asset(
        key=asset_key(NAME),
        group_name=GROUP,
        kinds={KIND, "parquet"},
        description="Merges small files of sinks, and deletes what was replaced.",
        output_required=False,
    )
    def compact_sinks(
        context: dg.AssetExecutionContext,
        *,
        config: CompactConfig,
        broker: BrokerResource,
        sinks: SinkResource,
    ) -> Iterator[dg.MaterializeResult[Any]]:
        with broker.client() as client:
            lease = WindowLease(client, name=WINDOW, owner=context.run.run_id)
            if holder := lease.open(takeover=False):
                say_yielded(context, asset_key(NAME), to=holder)
                return
            with lease:
                found = {
                    group: asdict(done)
                    for group, folder in _sinks(consumers, sinks)
                    if (
                        done := _compacted(
                            client, group, folder=folder, lease=lease, rules=config.rules()
                        )
                    )
                }
        yield dg.MaterializeResult(metadata=_metadata(found))

    return compact_sinks


def _sinks(consumers: Sequence[Consumer], sinks: SinkResource) -> Iterator[tuple[str, Address]]:
    """Yield each group with a sink, and the sink's folder."""
    for consumer in consumers:
        if consumer.spec.sink is not None:
            yield consumer.group.name, sinks.folder(consumer.spec.sink)


def _compacted(
    client: Client, group: str, *, folder: Address, lease: WindowLease, rules: compaction.Rules
) -> compaction.Compacted | None:
    """Compact a sink; return None if the group or the sink does not exist yet."""
    if not at(folder).folders(""):
        return None
    try:
        return compaction.compact(
            client,
            group,
            sink=folder,
            window=lease.fence,
            rules=rules,
            going_on=lambda: not lease.lost,
        )
    except NotFoundError:
        return None


def _metadata(found: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Return totals, and a table with one row per sink."""
    names = compaction.Compacted().__dataclass_fields__
    totals: dict[str, Any] = {name: sum(done[name] for done in found.values()) for name in names}
    records = [dg.TableRecord({"consumer_group": group, **done}) for group, done in found.items()]
    if records:
        totals["sinks"] = dg.MetadataValue.table(records)
    return totals


def compact_sinks_job() -> Any:
    """Return the job that compacts."""
    return dg.define_asset_job(
        NAME,
        selection=dg.AssetSelection.assets(asset_key(NAME)),
        tags=window_tags(NAME),
        executor_def=dg.in_process_executor,
        description="Merges small files of the sinks, and deletes those that were replaced.",
    )


def compact_sinks_sensor(consumers: Sequence[Consumer], job: Any) -> dg.SensorDefinition:
    """Return the sensor that starts compactions, one at a time, when there are files for it."""

    @dg.sensor(
        name=NAME,
        job=job,
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=LOOK_EVERY_S,
        description="Starts a compaction when sinks have many small files, or replaced ones.",
    )
    def compact_sinks(
        context: dg.SensorEvaluationContext, *, broker: BrokerResource, sinks: SinkResource
    ) -> dg.SensorResult:
        under_way = dg.RunsFilter(tags={WINDOW_TAG: NAME}, statuses=list(_UNDER_WAY))
        if context.instance.get_runs_count(under_way):
            return dg.SensorResult(skip_reason="A compaction is under way.")
        backoff = Backoff(context.instance)
        if backoff.holds(NAME):
            return dg.SensorResult(skip_reason=skip_reason(backoff.reasons()))
        try:
            with broker.client(retry_s=CONNECT_RETRY_S) as client:
                due = [
                    g for g, folder in _sinks(consumers, sinks) if _is_due(client, g, folder=folder)
                ]
                now_ms = int(client.due()["now_ms"])
        except BusyError as error:
            return dg.SensorResult(skip_reason=str(error))
        if not due:
            return dg.SensorResult(skip_reason="No sink has enough small files.")
        serial = next_serial(int(context.cursor or 0), now_ms=now_ms)
        request = dg.RunRequest(
            run_key=f"{NAME}/{serial}", tags={"rmq/reason": f"small files of {', '.join(due)}"}
        )
        return dg.SensorResult(run_requests=[request], cursor=str(serial))

    return compact_sinks


def _is_due(client: Client, group: str, *, folder: Address) -> bool:
    try:
        return bool(at(folder).folders("")) and compaction.is_due(client, group, sink=folder)
    except NotFoundError:
        return False
