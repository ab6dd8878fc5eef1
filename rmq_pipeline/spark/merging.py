"""Compaction of large segments in Spark: one task per merged segment."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.archive.segment_file import Merger
from rmq_pipeline.errors import CorruptLogError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


def merge_all(session: "SparkSession", plans: Sequence[dict[str, Any]]) -> Iterator[Segment | None]:
    """Run the plans of ``plan_compaction``; return the merged segments in the order of the plans.

    An entry is None if an input was damaged and nothing was written. A retried or speculative task
    writes the same file under the same name.
    """
    if not plans:
        return iter(())
    numbered = [(at, json.dumps(plan)) for at, plan in enumerate(plans)]
    rows = session.createDataFrame(numbered, "ordinal INT, plan STRING")
    # One task per plan; Spark would put this small table into fewer.
    spread = rows.repartitionByRange(len(plans), "ordinal")
    done = spread.mapInArrow(_merge, "ordinal INT, path STRING").orderBy("ordinal").collect()
    return (None if row["path"] is None else Segment.from_path(row["path"]) for row in done)


def merge_one(plan: Mapping[str, Any]) -> Segment | None:
    """Run one plan; return None if an input is damaged and nothing was written."""
    try:
        return Merger.from_json(plan).run()
    except CorruptLogError as error:
        log.warning("merge skipped, because an input is damaged: %s", error)
        return None


def _merge(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        plans = [json.loads(text) for text in batch.column("plan").to_pylist()]
        merged = [merge_one(plan) for plan in plans]
        paths = pa.array([each and each.relative for each in merged], pa.string())
        columns = [batch.column("ordinal"), paths]
        yield pa.RecordBatch.from_arrays(columns, names=["ordinal", "path"])
