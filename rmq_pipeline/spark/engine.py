"""Spark as the engine of a window: a task for each part of a micro-batch."""

import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from rmq_pipeline.handling.engine import Work
from rmq_pipeline.handling.worked import Worked
from rmq_pipeline.spark import job
from rmq_pipeline.spark.parcel import Given, Parcel, pack

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Fewer messages are one task: a second one costs more than it saves.
ROWS_PER_TASK: Final = 500


class SparkEngine:
    """A context manager: its folder goes with it. The session is asked for with the first batch."""

    def __init__(
        self, spark: "Callable[[], SparkSession]", *, parallelism: int, handoff: Path | None
    ) -> None:
        self._spark = spark
        self._parallelism = parallelism
        self._parent = handoff
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
        """As many as may be: a small first batch would cost a job of its own."""
        return sys.maxsize

    @property
    def least_rows(self) -> int:
        """A task's: a job has its price, the first one the most, whatever the messages take."""
        return ROWS_PER_TASK

    @property
    def at_once(self) -> int:
        """A task for each core."""
        return self._parallelism

    def parts(self, rows: int) -> int:
        """A task for every ROWS_PER_TASK, as many as may be."""
        return min(self._parallelism, 1 + rows // ROWS_PER_TASK)

    def task(self, work: Work, stopping: threading.Event) -> Callable[[], Worked]:  # noqa: ARG002
        """A Spark job, which nothing stops."""
        spark = self._spark()
        number = work.batch.number
        folder = self._handoff() / f"{work.epoch}-{number}"
        folder.mkdir()
        parts = _packed(work, folder)
        this = job.Job(work.rules, folder, sink=work.sink, epoch=work.epoch, batch=number)

        def run() -> Worked:
            try:
                return job.run(spark, parts, job=this)
            finally:
                # What is mapped into memory stays there until it is let go.
                shutil.rmtree(folder, ignore_errors=True)

        return run

    def _handoff(self) -> Path:
        """A folder for tables too large for a row."""
        if self._folder is None:
            if self._parent is not None:
                self._parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="rmq-", dir=self._parent))
        return self._folder


def _packed(work: Work, folder: Path) -> list[Given]:
    """What each part's task is to be given."""
    given = []
    for part, (messages, state) in enumerate(work.batch.given(work.state)):
        known = Parcel(None, None)
        if state is not None:
            known = pack(state, folder, label=f"{part}-state")
        given.append(Given(part, *pack(messages, folder, label=f"{part}-messages"), *known))
    return given
