"""The Spark job of a micro-batch: ``mapInArrow`` over its parts, a walk and a sink file in each."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from rmq_pipeline.handling import sink
from rmq_pipeline.handling.group_walk import Rules, rare_collections, walk
from rmq_pipeline.handling.worked import (
    EXCEPTIONS,
    Piece,
    Worked,
    WorkerDiedError,
    gathered,
    pieces,
)
from rmq_pipeline.spark.parcel import (
    ANSWER,
    ANSWER_DDL,
    GIVEN,
    Answer,
    Given,
    answers,
    given,
    pack,
    to_batch,
    unpack,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_WORKER_DIED: Final = "Python worker exited unexpectedly"


@dataclass(frozen=True, slots=True)
class Job:
    """What every task of a micro-batch is told."""

    rules: Rules
    #: A folder that driver and tasks reach, for tables too large for a row.
    handoff: Path
    sink: Path | None
    epoch: int
    batch: int


def run(spark: "SparkSession", parts: list[Given], *, job: Job) -> Worked:
    """Walk the parts of a micro-batch, each in a task of its own.

    Raises:
        WorkerDiedError: it may be a message's fault, nobody knows which one's.
        RuntimeError: a part was not answered exactly once.
    """

    def tasks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in given(batch):
                yield to_batch(_work(part, job), ANSWER)

    # Spark makes a task of each record batch.
    rows = pa.Table.from_batches([to_batch([part], GIVEN) for part in parts])
    frame = spark.createDataFrame(rows).mapInArrow(tasks, ANSWER_DDL)
    try:
        found = answers(frame.toArrow())
    except Exception as error:
        # Spark has no class for it: classic and Connect raise different ones, with these words.
        if _WORKER_DIED in str(error):
            raise WorkerDiedError("The Python worker died.") from error
        raise
    answered = sorted(a.part for a in found if a.kind == EXCEPTIONS)
    if answered != [given_part.part for given_part in parts]:
        raise RuntimeError(f"{len(parts)} parts, and answers from {answered}.")
    return gathered(Piece(a.part, a.kind, a.name, unpack(a.payload, a.path)) for a in found)


def _work(part: Given, job: Job) -> list[Answer]:
    messages = unpack(part.messages, part.messages_path)
    state = unpack(part.state, part.state_path) if part.state or part.state_path else None
    with rare_collections():
        walked = walk(messages, state, rules=job.rules)
    files = None
    if walked.rows is not None and job.sink is not None:
        files = sink.stage(
            job.sink,
            walked.rows,
            partition_time=job.rules.partition_time,
            epoch=job.epoch,
            batch=job.batch,
            messages=messages,
        )
    return [
        Answer(part.part, kind, name, *pack(table, job.handoff, label=f"{part.part}-{kind}"))
        for _, kind, name, table in pieces(part.part, walked, files=files)
    ]
