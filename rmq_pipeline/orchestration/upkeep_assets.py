"""Assets of the broker's background work: each materialization reports one window."""

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import dagster as dg
import pyarrow as pa

from rmq_pipeline import limits, logs, schema
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration import plot
from rmq_pipeline.orchestration.declarations import KIND
from rmq_pipeline.orchestration.resources import BrokerResource, LazyPySparkResource
from rmq_pipeline.orchestration.windows import (
    JOBS,
    OVERTIME_S,
    WINDOW_S,
    Fence,
    Report,
    Slice,
    UpkeepJob,
    WindowResult,
    run_upkeep_window,
)
from rmq_pipeline.spark.merging import merge_all, merge_one
from rmq_pipeline.spark.session import is_local, prepare_environment

log = logging.getLogger(__name__)

GROUP: Final = "upkeep"
WINDOW_TAG: Final = "rmq/window"
#: Maximum runtime of a window: 10 minutes, plus the time to start and end. A run that exceeds it is
#: lost, and Dagster has no other sign of that. Other jobs have no limit.
WINDOW_MAX_S: Final = 1200
YIELDED_TAG: Final = "rmq/yielded_to"
#: Tag of a consumer's run that succeeded without an acked message.
NOTHING_ACKED_TAG: Final = "rmq/nothing_acked"
SEAL: Final = "seal"
COMPACT: Final = "compact"
EXPIRE: Final = "expire"
ARCHIVE_JOBS: Final = (SEAL, COMPACT, EXPIRE)
#: Keys of seal's report about the retained history of events and states.
_HISTORY: Final = ("event_rows", "snapshot_rows", "merged_event_rows", "forgotten_files")
#: A materialization lists at most this many topics, the largest first.
_LISTED_TOPICS: Final = 50
_COLUMN_TEXTS: Final = {
    "queue_id": "Of the path; not in the files.",
    "queue_offset": "Ascending, without a gap.",
    "message_group_hash": "64 bits of the message group; 0 for none.",
    "born_at_ms": "When it was made, ms since 1970, as its producer says.",
    "stored_at_ms": "When it was stored, ms since 1970: ascending.",
    "deliver_at_ms": "For which time it was scheduled; null for none.",
}


class WindowConfig(dg.Config):
    """Settings of one run of a window."""

    seconds: float = WINDOW_S
    #: A busy window waits this much longer for its successor.
    overtime_seconds: float = OVERTIME_S
    #: Epoch of the open window to take over from; the run yields to any other open window.
    hand_over_from: int = 0


def asset_key(job: str) -> dg.AssetKey:
    """Return the key of the asset of a kind of work."""
    return dg.AssetKey([GROUP, job])


def op_name(job: str) -> str:
    """Return the name of its op, for run config."""
    return asset_key(job).to_python_identifier()


def upkeep_asset(job: UpkeepJob) -> dg.AssetsDefinition:
    """Return the asset whose run is a window of this kind of work."""

    @dg.asset(
        key=asset_key(job.name),
        group_name=GROUP,
        kinds={KIND},
        description=job.description,
        output_required=False,
    )
    def window(
        context: dg.AssetExecutionContext, *, config: WindowConfig, broker: BrokerResource
    ) -> Iterator[dg.MaterializeResult[Any]]:
        result = run_window(context, job, config=config, broker=broker)
        if not result.yielded_to:
            yield dg.MaterializeResult(metadata=metadata(job, result))

    return window


def run_window(
    context: dg.AssetExecutionContext,
    job: UpkeepJob,
    *,
    config: WindowConfig,
    broker: BrokerResource,
) -> WindowResult:
    """Do a window's work in a run, with observations; yield if another window is open."""
    logs.set_up_library()

    def observe(done: Slice) -> None:
        if done.work:
            observation = {"at_s": round(done.at_s, 1), **shown(done.report)}
            context.log_event(dg.AssetObservation(asset_key(job.name), metadata=observation))

    with broker.client() as client:
        result = run_upkeep_window(
            client,
            job,
            owner=context.run.run_id,
            seconds=config.seconds,
            overtime=config.overtime_seconds,
            hand_over_from=config.hand_over_from,
            observe=observe,
        )
    if result.yielded_to:
        say_yielded(context, asset_key(job.name), to=result.yielded_to)
    return result


def say_yielded(context: dg.AssetExecutionContext, key: dg.AssetKey, *, to: str) -> None:
    """End a run as a success that explains why it did nothing: no materialization, no checks."""
    context.log.info("The window belongs to %s.", to)
    context.log_event(dg.AssetObservation(key, metadata={"yielded_to": to}))
    context.instance.add_run_tags(context.run.run_id, {YIELDED_TAG: to})


def window_tags(name: str) -> dict[str, str]:
    """Return the tags of a job whose runs are windows: they limit the number and time of runs."""
    return {WINDOW_TAG: name, dg.MAX_RUNTIME_SECONDS_TAG: str(WINDOW_MAX_S)}


def upkeep_job(job: UpkeepJob, *others: dg.AssetKey) -> Any:
    """Return the job of the same name, with the tag that limits its runs.

    Args:
        job: the kind of work.
        others: further assets that its window materializes.
    """
    return dg.define_asset_job(
        job.name,
        selection=dg.AssetSelection.assets(asset_key(job.name), *others).without_checks(),
        description=job.description,
        tags=window_tags(job.name),
        executor_def=dg.in_process_executor,
    )


def shown(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report's facts as metadata; facts without a value are omitted."""
    return {key: value for key, value in report.items() if value is not None}


def metadata(job: UpkeepJob, result: WindowResult) -> dict[str, Any]:
    """Return the metadata of a window's materialization: totals, rate, and a chart."""
    found: dict[str, Any] = {
        "epoch": result.epoch,
        "seconds": round(result.seconds, 1),
        "slices": len(result.slices),
        "handed_over": result.handed_over,
        "work": result.work,
        **{key: result.total(key) for key in job.counts},
    }
    if result.seconds:
        found["per_second"] = round(result.work / result.seconds, 1)
    if levels := result.per_level():
        found["per_level"] = levels
    if lateness := result.lateness_ms():
        found |= {f"lateness_{name}_ms": value for name, value in lateness.items()}
    if result.slices:
        found["chart"] = dg.MetadataValue.md(plot.markdown(_panels(result)))
    return found


def _panels(result: WindowResult) -> list[plot.Series]:
    ends = [one.at_s for one in result.slices]
    lengths = [end - begin for begin, end in zip([0.0, *ends[:-1]], ends, strict=True)]
    rates = [s.work / max(length, 1e-3) for s, length in zip(result.slices, lengths, strict=True)]
    panels = [plot.Series("done per second", ends, rates)]
    late = [
        (s.at_s, float((s.report.get("lateness_ms") or {}).get("max") or 0))
        for s in result.slices
        if s.work
    ]
    if any("lateness_ms" in s.report for s in result.slices) and late:
        seconds, values = zip(*late, strict=True)
        panels.append(plot.Series("latest delivery, ms late", seconds, values, color="#d1532c"))
    return panels


def archive_assets() -> list[dg.AssetsDefinition]:
    """Return the assets of sealing, merging and expiry; metadata shows the state of the archive."""
    return [_archive_asset(SEAL), _archive_asset(EXPIRE), _compact_asset()]


def _archive_asset(name: str) -> dg.AssetsDefinition:
    job = JOBS[name]

    @dg.asset(
        key=asset_key(name),
        group_name=GROUP,
        kinds={KIND, "parquet"},
        description=job.description,
        metadata=column_schema() if name == SEAL else None,
        output_required=False,
    )
    def window(
        context: dg.AssetExecutionContext, *, config: WindowConfig, broker: BrokerResource
    ) -> Iterator[dg.MaterializeResult[Any]]:
        result = run_window(context, job, config=config, broker=broker)
        if not result.yielded_to:
            yield dg.MaterializeResult(metadata=_archive_metadata(job, result, broker=broker))

    return window


def _compact_asset() -> dg.AssetsDefinition:
    @dg.asset(
        key=asset_key(COMPACT),
        group_name=GROUP,
        kinds={KIND, "parquet", "pyspark"},
        description=JOBS[COMPACT].description,
        output_required=False,
    )
    def window(
        context: dg.AssetExecutionContext,
        *,
        config: WindowConfig,
        broker: BrokerResource,
        spark: LazyPySparkResource,
    ) -> Iterator[dg.MaterializeResult[Any]]:
        def session() -> Any:
            prepare_environment(spark.spark_config)
            return spark.spark_session

        job = compaction(session, shares_files=is_local(spark.spark_config))
        result = run_window(context, job, config=config, broker=broker)
        if not result.yielded_to:
            yield dg.MaterializeResult(metadata=_archive_metadata(job, result, broker=broker))

    return window


def compaction(
    session: Callable[[], Any],
    *,
    spark_bytes: int = limits.COMPACT_SPARK_BYTES,
    shares_files: bool = True,
) -> UpkeepJob:
    """Return the compaction job; it merges in this process, or through Spark if there is much.

    If Spark does not start, or its tasks cannot read the archive, this process merges everything.

    Args:
        session: starts Spark.
        shares_files: tasks read the files of this machine. Otherwise they merge only an archive
            at the URI of a file system.
        spark_bytes: Spark is used above this size of the planned input.
    """
    spark = _LazySpark(session)

    def call(client: Client, *, wait_ms: int, window: Fence) -> Report:  # noqa: ARG001
        plans = client.plan_compaction(limit_bytes=8 * spark_bytes)
        large = sum(plan["bytes"] for plan in plans) > spark_bytes
        readable = shares_files or all("://" in plan["root"] for plan in plans)
        started = spark.start() if large and readable else None
        if started is None:
            # In small slices, because the window's lease is renewed after each slice.
            plans = plans[: 1 + _within(plans, limits.COMPACT_TARGET_BYTES)]
        merged: Iterator[Segment | None] = (
            (merge_one(plan) for plan in plans) if started is None else merge_all(started, plans)
        )
        counts = dict.fromkeys(JOBS[COMPACT].counts, 0)
        report: Report = {**counts, "spark": int(started is not None)}
        for plan, added in zip(plans, merged, strict=True):
            if added is None:
                # The broker finds the damage itself, and excludes the segment from later plans.
                topic = Segment.from_path(plan["inputs"][0]).topic
                done = client.compact(topic=topic, limit_bytes=1, window=window)
            else:
                done = client.replace_segments(plan["inputs"], added=added.relative, window=window)
            for key in JOBS[COMPACT].counts:
                report[key] += done[key]
        return report

    return replace(JOBS[COMPACT], call=call)


class _LazySpark:
    """Lazily started Spark session; after a failed start, Spark is not tried again."""

    def __init__(self, session: Callable[[], Any]) -> None:
        self._session = session
        self._failed = False

    def start(self) -> Any:
        """Return the session; None if Spark is not available."""
        if self._failed:
            return None
        try:
            return self._session()
        except Exception:
            # A missing JVM, cluster or memory raises different classes.
            log.warning("Spark did not start: this process merges.", exc_info=True)
            self._failed = True
            return None


def _within(plans: list[dict[str, Any]], limit_bytes: int) -> int:
    """Return the number of plans, from the first on, whose total size is within a limit."""
    total = 0
    for count, plan in enumerate(plans):
        total += plan["bytes"]
        if total > limit_bytes:
            return count
    return len(plans)


def _archive_metadata(
    job: UpkeepJob, result: WindowResult, *, broker: BrokerResource
) -> dict[str, Any]:
    """Return metadata about the window and the present archive."""
    with broker.client() as client:
        archive = client.archive()
    found = metadata(job, result)
    found |= {name: result.total(name) for name in ("rows", "bytes")}
    raw, written = result.total("raw_bytes"), result.total("bytes")
    if raw and written:
        found |= {"raw_bytes": raw, "ratio": round(written / raw, 4)}
    if job.name == SEAL:
        found |= {f"history_{name}": result.total(name) for name in _HISTORY}
    found |= {f"archive_{name}": archive[name] for name in ("files", "rows", "bytes")}
    if archive["rows"]:
        found["archive_bytes_per_message"] = round(archive["bytes"] / archive["rows"], 1)
    found["archive_root"] = dg.MetadataValue.path(archive["root"])
    if archive["topics"]:
        found["topics"] = _topic_table(archive["topics"])
    return found


def _topic_table(topics: list[dict[str, Any]]) -> dg.TableMetadataValue:
    largest = sorted(topics, key=lambda topic: -topic["bytes"])[:_LISTED_TOPICS]
    names = ("topic", "files", "rows", "bytes")
    return dg.MetadataValue.table(
        [dg.TableRecord({name: topic[name] for name in names}) for topic in largest]
    )


@functools.cache
def _columns() -> dg.TableSchema:
    fields = [field for field in schema.MESSAGE if field.name not in ("topic_id", "queue_id")]
    fields = [pa.field("queue_id", pa.int32()), *fields]
    return dg.TableSchema(
        [
            dg.TableColumn(field.name, str(field.type), _COLUMN_TEXTS.get(field.name))
            for field in fields
            if field.name != "target_topic_id"
        ]
    )


def column_schema() -> dict[str, Any]:
    """Return the columns of segments as metadata for Dagster's UI."""
    return {"dagster/column_schema": _columns()}
