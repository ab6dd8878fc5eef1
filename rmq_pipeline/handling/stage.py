"""The thread beside a window's, in which its engine works on one micro-batch after the other."""

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
    """A micro-batch that the engine works on, or will."""

    batch: Batch
    #: On the monotonic clock.
    received_at: float
    _result: "Future[tuple[Worked, float]]"

    @property
    def done(self) -> bool:
        """Whether it can be settled at once."""
        return self._result.done()

    def is_done_within(self, seconds: float) -> bool:
        """Wait for so long at most; whether ``result`` would wait no more."""
        return bool(wait([self._result], seconds).done)

    def result(self) -> tuple[Worked, float]:
        """What it leaves, and the seconds it took; waits for it.

        Raises:
            WorkerDiedError: it may be a message's fault, nobody knows which one's.
        """
        return self._result.result()

    def left(self) -> Worked | None:
        """What it left, if it was worked on at all; the stage has ended."""
        if self._result.cancelled() or self._result.exception() is not None:
            return None
        return self._result.result()[0]


class Stage:
    """A context manager; at its end nothing works and no file is written any more."""

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
        """Have it worked on after those before it."""
        task = self._engine.task(work, self._stopping)
        return Pending(work.batch, received_at, self._thread.submit(_timed, task))


def _timed(task: Callable[[], Worked]) -> tuple[Worked, float]:
    started = time.monotonic()
    return task(), time.monotonic() - started
