"""The Spark job of a micro-batch: ``mapInArrow`` over its parts, a walk and a sink file in each."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.spark import sink
from rmq_pipeline.spark.group_walk import Rules, walk
from rmq_pipeline.spark.parcel import PARCEL_DDL, Parcel, from_rows, pack, to_batch, unpack

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class Job:
    """What every task of a micro-batch is told."""

    rules: Rules
    #: A folder that driver and tasks reach, for tables too large for a row.
    handoff: Path
    sink: Path | None
    epoch: int
    batch: int


@dataclass(frozen=True, slots=True)
class JobResult:
    """What the tasks of a micro-batch leave to settle."""

    #: part -> harvest.EXCEPTION.
    exceptions: dict[int, pa.Table]
    #: schema.SINK_FILE; they do not count yet.
    files: pa.Table
    state: pa.Table | None
    publish: dict[str, pa.Table]


def run(spark: "SparkSession", parts: list[list[Parcel]], job: Job) -> JobResult:
    """Walk the parts of a micro-batch, each in a task of its own.

    Raises:
        RuntimeError: a part was not answered exactly once.
    """

    def tasks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _tasks(batches, job)

    # One record batch is one partition.
    rows = pa.Table.from_batches([to_batch(parcels) for parcels in parts])
    answer = spark.createDataFrame(rows).mapInArrow(tasks, PARCEL_DDL).toArrow()
    result = _gathered(from_rows(answer))
    if sorted(result.exceptions) != list(range(len(parts))):
        raise RuntimeError(f"{len(parts)} parts, and answers from {sorted(result.exceptions)}.")
    return result


def _tasks(batches: Iterator[pa.RecordBatch], job: Job) -> Iterator[pa.RecordBatch]:
    parts: dict[int, dict[str, pa.Table]] = {}
    for batch in batches:
        for parcel in from_rows(batch):
            parts.setdefault(parcel.part, {})[parcel.kind] = unpack(parcel)
    for part, tables in parts.items():
        yield to_batch(_work(part, tables, job))


def _work(part: int, tables: dict[str, pa.Table], job: Job) -> list[Parcel]:
    walked = walk(tables["messages"], tables.get("state"), job.rules)
    found: list[tuple[str, str, pa.Table]] = [("exceptions", "", walked.exceptions)]
    if walked.rows is not None and job.sink is not None:
        files = sink.stage(
            job.sink,
            walked.rows,
            partition_time=job.rules.partition_time,
            epoch=job.epoch,
            batch=job.batch,
        )
        found.append(("files", "", files))
    if walked.state is not None:
        found.append(("state", "", walked.state))
    found += [("publish", topic, table) for topic, table in walked.publish.items()]
    return [
        pack(table, job.handoff, part=part, kind=kind, name=name) for kind, name, table in found
    ]


def _gathered(parcels: list[Parcel]) -> JobResult:
    tables: dict[tuple[str, str], list[pa.Table]] = {}
    exceptions = {}
    for parcel in parcels:
        table = unpack(parcel)
        if parcel.kind == "exceptions":
            exceptions[parcel.part] = table
        else:
            tables.setdefault((parcel.kind, parcel.name), []).append(table)
    whole = {key: pa.concat_tables(found) for key, found in tables.items()}
    return JobResult(
        exceptions=exceptions,
        files=whole.get(("files", ""), schema.SINK_FILE.empty_table()),
        state=whole.get(("state", "")),
        publish={name: table for (kind, name), table in whole.items() if kind == "publish"},
    )
