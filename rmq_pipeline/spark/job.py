"""The Spark job of a micro-batch: ``mapInArrow`` walks each part and stages its sink file."""

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
from rmq_pipeline.spark.arrow_transport import (
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
    """Constants of a micro-batch for all its tasks."""

    rules: Rules
    #: A folder that driver and tasks reach, for tables too large for a row.
    handoff: Path
    sink: Path | None
    epoch: int
    batch: int


def run(spark: "SparkSession", parts: list[Given], *, job: Job) -> Worked:
    """Walk the parts of a micro-batch, each in its own task.

    Raises:
        WorkerDiedError: a Python worker died; any of its messages may be the cause.
        RuntimeError: a part has no answer, or several.
    """

    def tasks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in given(batch):
                yield to_batch(_work(part, job), ANSWER)

    # Spark makes one task per record batch.
    rows = pa.Table.from_batches([to_batch([part], GIVEN) for part in parts])
    frame = spark.createDataFrame(rows).mapInArrow(tasks, ANSWER_DDL)
    try:
        found = answers(frame.toArrow())
    except Exception as error:
        # Classic Spark and Spark Connect raise different classes, but with the same words.
        if _WORKER_DIED in str(error):
            raise WorkerDiedError("The Python worker died.") from error
        raise
    answered = sorted(a.part for a in found if a.kind == EXCEPTIONS)
    if answered != [given_part.part for given_part in parts]:
        raise RuntimeError(
            f"The {len(parts)} parts need one answer each; answers came from parts {answered}."
        )
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
