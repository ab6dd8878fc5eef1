"""Windows of a consumer that runs in Spark: an engine with one task per part of a micro-batch.

The job of a micro-batch passes each part to the handler in ``mapInArrow`` and stages its sink file.
"""

import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import pyarrow as pa
from typing_extensions import Unpack

from rmq_pipeline.errors import RequestError
from rmq_pipeline.handling import sink, window
from rmq_pipeline.handling.executor import Work
from rmq_pipeline.handling.group_walk import Rules, rare_collections, walk
from rmq_pipeline.handling.results import (
    EXCEPTIONS,
    BatchReport,
    BatchResult,
    Piece,
    WindowReport,
    WorkerDiedError,
    gathered,
    pieces,
)
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.spark.arrow_transport import (
    ANSWER,
    ANSWER_DDL,
    GIVEN,
    Answer,
    Given,
    PackedTable,
    answers,
    given,
    pack,
    to_batch,
    unpack,
)
from rmq_pipeline.spark.session import shares_files
from rmq_pipeline.storage.root import Address
from rmq_pipeline.verbs import Verbs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


__all__ = ["BatchReport", "ConsumerSpec", "WindowReport", "run_window"]

_WORKER_DIED: Final = "Python worker exited unexpectedly"
#: In the traceback of a task that cannot load the handler, or this library.
_NO_MODULE: Final = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
_MODULE_REMEDY: Final = (
    "Install rmq_pipeline and the project in the Python environment of the workers, or name their"
    " wheels in spark.submit.pyFiles of spark-defaults.conf."
)
#: Up to this many messages a second task costs more than it saves.
ROWS_PER_TASK: Final = 500


@dataclass(frozen=True, slots=True)
class BatchJob:
    """Constants of a micro-batch for all its tasks."""

    rules: Rules
    #: A folder that driver and tasks reach, for tables too large for a row; None: there is none.
    handoff: Path | None
    sink: Address | None
    epoch: int
    batch: int


def run_job(spark: "SparkSession", parts: list[Given], *, job: BatchJob) -> BatchResult:
    """Walk the parts of a micro-batch, each in its own task.

    Raises:
        WorkerDiedError: a Python worker died; any of its messages may be the cause.
        RequestError: the workers cannot import the handler.
        RuntimeError: a part has no answer, or several.
    """

    def tasks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in given(batch):
                yield to_batch(_handle_part(part, job), ANSWER)

    # Spark makes one task per record batch.
    rows = pa.Table.from_batches([to_batch([part], GIVEN) for part in parts])
    frame = spark.createDataFrame(rows).mapInArrow(tasks, ANSWER_DDL)
    try:
        found = answers(frame.toArrow())
    except Exception as error:
        # Classic Spark and Spark Connect raise different classes, but with the same words.
        if _WORKER_DIED in str(error):
            raise WorkerDiedError("The Python worker died.") from error
        if lacking := _NO_MODULE.search(str(error)):
            raise RequestError(
                f"The Spark workers have no module {lacking[1]}.", remedy=_MODULE_REMEDY
            ) from error
        raise
    answered = sorted(a.part for a in found if a.kind == EXCEPTIONS)
    if answered != [given_part.part for given_part in parts]:
        raise RuntimeError(
            f"The {len(parts)} parts need one answer each; answers came from parts {answered}."
        )
    return gathered(Piece(a.part, a.kind, a.name, unpack(a.payload, a.path)) for a in found)


def _handle_part(part: Given, job: BatchJob) -> list[Answer]:
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


class SparkEngine:
    """Engine that runs a Spark job per micro-batch; a context manager that deletes its folder.

    It asks for the session when the first batch comes.
    """

    def __init__(self, spark: "Callable[[], SparkSession]", *, parallelism: int) -> None:
        self._spark = spark
        self._parallelism = parallelism
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def first_rows(self) -> int:
        """No limit: a small first batch would cost a whole job."""
        return sys.maxsize

    @property
    def least_rows(self) -> int:
        """The rows of one task: each job has a fixed cost, however little the messages take."""
        return ROWS_PER_TASK

    @property
    def at_once(self) -> int:
        """One part per core."""
        return self._parallelism

    def parts(self, rows: int) -> int:
        """Return one part per ROWS_PER_TASK messages, at most ``parallelism``."""
        return min(self._parallelism, 1 + rows // ROWS_PER_TASK)

    def task(
        self,
        work: Work,
        stopping: threading.Event,  # noqa: ARG002
    ) -> Callable[[], BatchResult]:
        """Return a function that runs the Spark job; ``stopping`` does not interrupt it."""
        spark = self._spark()
        number = work.batch.number
        folder = self._handoff(work) if shares_files(spark) else None
        parts = _packed_parts(work, folder)
        this = BatchJob(work.rules, folder, sink=work.sink, epoch=work.epoch, batch=number)

        def run() -> BatchResult:
            try:
                return run_job(spark, parts, job=this)
            finally:
                # Tables that are still mapped stay readable after their files are deleted.
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)

        return run

    def _handoff(self, work: Work) -> Path:
        """Create the folder of a micro-batch for tables too large for a row."""
        if self._folder is None:
            # Below a local sink there is space for them.
            parent = work.sink / "_handoff" if isinstance(work.sink, Path) else None
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="rmq-", dir=parent))
        folder = self._folder / f"{work.epoch}-{work.batch.number}"
        folder.mkdir()
        return folder


def _packed_parts(work: Work, folder: Path | None) -> list[Given]:
    """Return the input of each part's task."""
    given = []
    for part, (messages, state) in enumerate(work.batch.given(work.state)):
        known = PackedTable(None, None)
        if state is not None:
            known = pack(state, folder, label=f"{part}-state")
        given.append(Given(part, *pack(messages, folder, label=f"{part}-messages"), *known))
    return given


def run_window(
    spec: ConsumerSpec,
    verbs: Verbs,
    *,
    spark: "Callable[[], SparkSession]",
    parallelism: int = 2,
    **terms: Unpack[window.Terms],
) -> WindowReport:
    """Run a window of ``handling.window`` that handles a group's messages in Spark.

    Args:
        spec: the consumer.
        verbs: flight.client.Client, or the broker itself.
        spark: returns the session; called once the first message has been received.
        parallelism: tasks of a micro-batch.
        terms: see handling.window.Terms.
    """
    with SparkEngine(spark, parallelism=parallelism) as engine:
        return window.run_window(spec, verbs, engine=engine, **terms)
