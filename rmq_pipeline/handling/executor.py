"""The engine of a window (Spark or threads), and the work it receives."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import pyarrow as pa

from rmq_pipeline.handling.batch import Batch
from rmq_pipeline.handling.group_walk import Rules
from rmq_pipeline.handling.results import BatchResult
from rmq_pipeline.storage.root import Address
from rmq_pipeline.tracing import NONE, Span


@dataclass(frozen=True, slots=True)
class Work:
    """A micro-batch, with the context that its walk needs."""

    rules: Rules
    batch: Batch
    #: State of its message groups; None if the consumer keeps no state, or no group has any.
    state: pa.Table | None
    sink: Address | None
    #: The window's epoch.
    epoch: int
    #: The previous window was never closed. A message may have killed its process, and must not
    #: kill the process of this window.
    is_suspect: bool = False
    #: Covers the batch from here to its settle; the current span of each call of the handler.
    span: Span = NONE


class Engine(Protocol):
    """Runs the handler on the parts of a micro-batch, and stages its sink files."""

    @property
    def first_rows(self) -> int:
        """Number of messages of the first batch, before the handler's speed is known."""
        ...

    @property
    def least_rows(self) -> int:
        """Minimum number of messages of a batch, however long a message takes."""
        ...

    @property
    def at_once(self) -> int:
        """Maximum number of parts that run concurrently."""
        ...

    def parts(self, rows: int) -> int:
        """Return the maximum number of parts for a batch of ``rows`` messages."""
        ...

    def task(self, work: Work, stopping: threading.Event) -> Callable[[], BatchResult]:
        """Prepare a task in the window's thread; the executor's thread then calls the task.

        Args:
            work: the micro-batch.
            stopping: set when the result is no longer needed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Pending:
    """A micro-batch that is queued or running."""

    batch: Batch
    #: On the monotonic clock.
    received_at: float
    _result: "Future[tuple[BatchResult, float]]"
    span: Span = NONE

    @property
    def done(self) -> bool:
        """True if it can be settled at once."""
        return self._result.done()

    def is_done_within(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return True if the result is available."""
        return bool(wait([self._result], seconds).done)

    def result(self) -> tuple[BatchResult, float]:
        """Wait for the result of the batch, and return it with the seconds it took.

        Raises:
            WorkerDiedError: a worker process died; any message may have killed it.
        """
        return self._result.result()

    def left(self) -> BatchResult | None:
        """Return the result if the batch was handled, else None; call after the executor's end."""
        if self._result.cancelled() or self._result.exception() is not None:
            return None
        return self._result.result()[0]


class Executor:
    """Context manager of the thread; at its end no work runs and no file is being written."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stopping = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="executor")

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
        return Pending(work.batch, received_at, self._thread.submit(_timed, task), work.span)


def _timed(task: Callable[[], BatchResult]) -> tuple[BatchResult, float]:
    started = time.monotonic()
    return task(), time.monotonic() - started
