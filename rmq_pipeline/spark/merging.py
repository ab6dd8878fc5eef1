"""Merging segments where there is much to merge: a Spark task for each large one."""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rmq_pipeline.archive.merging import Merger
from rmq_pipeline.archive.segment import Segment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def merge_all(session: "SparkSession", plans: Sequence[dict[str, Any]]) -> Iterator[Segment]:
    """Carry out what ``plan_compaction`` gave; the segments, in the order of the plans.

    A task that is tried again, or twice at a time, writes the same file under the same name.
    """
    if not plans:
        return iter(())
    numbered = [(at, json.dumps(plan)) for at, plan in enumerate(plans)]
    rows = session.createDataFrame(numbered, "ordinal INT, plan STRING")
    # A task each, however small the table that says so is.
    spread = rows.repartitionByRange(len(plans), "ordinal")
    done = spread.mapInArrow(_merge, "ordinal INT, path STRING").orderBy("ordinal").collect()
    return (Segment.from_path(row["path"]) for row in done)


def _merge(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        plans = [json.loads(text) for text in batch.column("plan").to_pylist()]
        paths = [Merger.from_json(plan).run().relative for plan in plans]
        columns = [batch.column("ordinal"), pa.array(paths, pa.string())]
        yield pa.RecordBatch.from_arrays(columns, names=["ordinal", "path"])
