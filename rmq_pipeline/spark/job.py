"""The Spark job of a micro-batch: ``mapInArrow`` over its parts, a walk and a sink file in each."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.spark import sink
from rmq_pipeline.spark.group_walk import Rules, walk
from rmq_pipeline.spark.harvest import EXCEPTION
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


EXCEPTIONS: Final = "exceptions"
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


@dataclass(frozen=True, slots=True)
class JobResult:
    """What the tasks of a micro-batch leave to settle."""

    #: part -> harvest.EXCEPTION.
    exceptions: dict[int, pa.Table]
    #: schema.SINK_FILE; they do not count yet.
    files: pa.Table
    state: pa.Table | None
    publish: dict[str, pa.Table]


class WorkerDiedError(Exception):
    """A Python worker ended in the middle of its part: a crash, a kill, out of memory."""


def run(spark: "SparkSession", parts: list[Given], *, job: Job) -> JobResult:
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
    return _gathered(found)


def failed(reason: str) -> JobResult:
    """What a micro-batch of one message leaves whose task never answered."""
    row = {
        "row": 0,
        "outcome": "retry",
        "retry_after_ms": None,
        "reason": reason,
        "error_type": WorkerDiedError.__name__,
    }
    return JobResult(
        exceptions={0: pa.Table.from_pylist([row], schema=EXCEPTION)},
        files=schema.SINK_FILE.empty_table(),
        state=None,
        publish={},
    )


def _work(part: Given, job: Job) -> list[Answer]:
    messages = unpack(part.messages, part.messages_path)
    state = unpack(part.state, part.state_path) if part.state or part.state_path else None
    with rare_collections():
        walked = walk(messages, state, rules=job.rules)
    found: list[tuple[str, str, pa.Table]] = [(EXCEPTIONS, "", walked.exceptions)]
    if walked.rows is not None and job.sink is not None:
        files = sink.stage(
            job.sink,
            walked.rows,
            partition_time=job.rules.partition_time,
            epoch=job.epoch,
            batch=job.batch,
            messages=messages,
        )
        found.append(("files", "", files))
    if walked.state is not None:
        found.append(("state", "", walked.state))
    found += [("publish", topic, table) for topic, table in walked.publish.items()]
    return [
        Answer(part.part, kind, name, *pack(table, job.handoff, label=f"{part.part}-{kind}"))
        for kind, name, table in found
    ]


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for cyclic garbage rarely: a walk makes many objects, and hardly any."""
    usual = gc.get_threshold()
    gc.set_threshold(100_000, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _gathered(found: list[Answer]) -> JobResult:
    exceptions: dict[int, pa.Table] = {}
    tables: dict[tuple[str, str], list[pa.Table]] = {}
    for answer in found:
        table = unpack(answer.payload, answer.path)
        if answer.kind == EXCEPTIONS:
            exceptions[answer.part] = table
        else:
            tables.setdefault((answer.kind, answer.name), []).append(table)
    whole = {key: pa.concat_tables(parts) for key, parts in tables.items()}
    return JobResult(
        exceptions=exceptions,
        files=whole.get(("files", ""), schema.SINK_FILE.empty_table()),
        state=whole.get(("state", "")),
        publish={name: table for (kind, name), table in whole.items() if kind == "publish"},
    )
