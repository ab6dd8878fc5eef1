"""The thread in which a window's engine handles one micro-batch after the other."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rmq_pipeline.handling.batch import Batch
from rmq_pipeline.handling.engine import Engine, Work
from rmq_pipeline.handling.worked import Worked


@dataclass(frozen=True, slots=True)
class Pending:
    """A micro-batch that is queued or running."""

    batch: Batch
    #: On the monotonic clock.
    received_at: float
    _result: "Future[tuple[Worked, float]]"

    @property
    def done(self) -> bool:
        """True if it can be settled at once."""
        return self._result.done()

    def is_done_within(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return True if the result is available."""
        return bool(wait([self._result], seconds).done)

    def result(self) -> tuple[Worked, float]:
        """Wait for the result of the batch, and return it with the seconds it took.

        Raises:
            WorkerDiedError: a worker process died; any message may have killed it.
        """
        return self._result.result()

    def left(self) -> Worked | None:
        """Return the result if the batch was handled, else None; call after the stage's end."""
        if self._result.cancelled() or self._result.exception() is not None:
            return None
        return self._result.result()[0]


class Stage:
    """Context manager of the thread; at its end no work runs and no file is being written."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stopping = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def submit(self, work: Work, *, received_at: float) -> Pending:
        """Queue a micro-batch."""
        task = self._engine.task(work, self._stopping)
        return Pending(work.batch, received_at, self._thread.submit(_timed, task))


def _timed(task: Callable[[], Worked]) -> tuple[Worked, float]:
    started = time.monotonic()
    return task(), time.monotonic() - started
