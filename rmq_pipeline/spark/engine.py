"""Spark as the engine of a window: one task per part of a micro-batch."""

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
from rmq_pipeline.spark.arrow_transport import Given, PackedTable, pack

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Up to this many messages a second task costs more than it saves.
ROWS_PER_TASK: Final = 500


class SparkEngine:
    """Engine that runs a Spark job per micro-batch; a context manager that deletes its folder.

    It asks for the session when the first batch comes.
    """

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

    def task(self, work: Work, stopping: threading.Event) -> Callable[[], Worked]:  # noqa: ARG002
        """Return a function that runs the Spark job; ``stopping`` does not interrupt it."""
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
                # Tables that are still mapped stay readable after their files are deleted.
                shutil.rmtree(folder, ignore_errors=True)

        return run

    def _handoff(self) -> Path:
        """Return the folder for tables too large for a row; created on first use."""
        if self._folder is None:
            if self._parent is not None:
                self._parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="rmq-", dir=self._parent))
        return self._folder


def _packed(work: Work, folder: Path) -> list[Given]:
    """Return the input of each part's task."""
    given = []
    for part, (messages, state) in enumerate(work.batch.given(work.state)):
        known = PackedTable(None, None)
        if state is not None:
            known = pack(state, folder, label=f"{part}-state")
        given.append(Given(part, *pack(messages, folder, label=f"{part}-messages"), *known))
    return given
