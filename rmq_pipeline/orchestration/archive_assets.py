"""Archive assets in Dagster: results of sealing, merging and expiry, and the present archive."""

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import dagster as dg
import pyarrow as pa
from dagster_pyspark import LazyPySparkResource

from rmq_pipeline import limits, schema
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.broker_resource import BrokerResource
from rmq_pipeline.orchestration.topic_assets import KIND
from rmq_pipeline.orchestration.upkeep_assets import (
    GROUP,
    WindowConfig,
    asset_key,
    metadata,
    run_window,
)
from rmq_pipeline.orchestration.windows import JOBS, Fence, Report, UpkeepJob, WindowResult
from rmq_pipeline.spark.merging import merge_all, merge_one
from rmq_pipeline.spark.session import prepare_environment

log = logging.getLogger(__name__)

SEAL: Final = "seal"
COMPACT: Final = "compact"
EXPIRE: Final = "expire"
NAMES: Final = (SEAL, COMPACT, EXPIRE)
#: Keys of seal's report about the retained history of events and states.
_HISTORY: Final = ("event_rows", "snapshot_rows", "merged_event_rows", "forgotten_files")
#: A materialization lists at most this many topics, the largest first.
_TOPICS: Final = 50
_COLUMNS: Final = {
    "queue_id": "Of the path; not in the files.",
    "queue_offset": "Ascending, without a gap.",
    "message_group_hash": "64 bits of the message group; 0 for none.",
    "born_at_ms": "When it was made, ms since 1970, as its producer says.",
    "stored_at_ms": "When it was stored, ms since 1970: ascending.",
    "deliver_at_ms": "For which time it was scheduled; null for none.",
}


def archive_assets() -> list[dg.AssetsDefinition]:
    """Return the assets of sealing, merging and expiry; metadata shows the state of the archive."""
    return [_asset(SEAL), _asset(EXPIRE), _compact_asset()]


def _asset(name: str) -> dg.AssetsDefinition:
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
            yield dg.MaterializeResult(metadata=_metadata(job, result, broker=broker))

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
            prepare_environment()
            return spark.spark_session

        job = compaction(session)
        result = run_window(context, job, config=config, broker=broker)
        if not result.yielded_to:
            yield dg.MaterializeResult(metadata=_metadata(job, result, broker=broker))

    return window


def compaction(
    session: Callable[[], Any], *, spark_bytes: int = limits.COMPACT_SPARK_BYTES
) -> UpkeepJob:
    """Return the compaction job; it merges in this process, or through Spark if there is much.

    If Spark does not start, this process merges everything.

    Args:
        session: starts Spark.
        spark_bytes: Spark is used above this size of the planned input.
    """
    spark = _Spark(session)

    def call(client: Client, *, wait_ms: int, window: Fence) -> Report:  # noqa: ARG001
        plans = client.plan_compaction(limit_bytes=8 * spark_bytes)
        large = sum(plan["bytes"] for plan in plans) > spark_bytes
        started = spark.start() if large else None
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


class _Spark:
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


def _metadata(job: UpkeepJob, result: WindowResult, *, broker: BrokerResource) -> dict[str, Any]:
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
        found["topics"] = _table(archive["topics"])
    return found


def _table(topics: list[dict[str, Any]]) -> dg.TableMetadataValue:
    largest = sorted(topics, key=lambda topic: -topic["bytes"])[:_TOPICS]
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
            dg.TableColumn(field.name, str(field.type), _COLUMNS.get(field.name))
            for field in fields
            if field.name != "target_topic_id"
        ]
    )


def column_schema() -> dict[str, Any]:
    """Return the columns of segments as metadata for Dagster's UI."""
    return {"dagster/column_schema": _columns()}
