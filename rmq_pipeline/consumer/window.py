"""Thread engine: handles the message groups of a window on threads of this process."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

import pyarrow as pa
from typing_extensions import Unpack

from rmq_pipeline.consumer.subprocess_handler import SubprocessHandler, start_subprocess
from rmq_pipeline.handling import sink, window
from rmq_pipeline.handling.executor import Work
from rmq_pipeline.handling.group_walk import rare_collections, walk
from rmq_pipeline.handling.report import WindowReport
from rmq_pipeline.handling.results import FILES, BatchResult, Piece, WalkResult, gathered, pieces
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.handling.window import Terms
from rmq_pipeline.verbs import Verbs

#: Several parts per thread, so that a thread that is done can help with slow parts.
PARTS_PER_THREAD: Final = 8
#: Size of the first batch. Two batches may be received before the first is settled, and one thread
#: handles a whole message group. With 37 s per message, twice 16 take 1,184 s, below the limit of
#: 1,200 s for a run. With 1 ms per message, batches grow quickly: 16, 128, 1,024, 8,192, 20,000.
FIRST_ROWS: Final = 16


class ThreadEngine:
    """Engine on a thread pool; the threads and their thread-locals live as long as the window.

    Each part of a micro-batch has whole message groups, so one thread handles a message group. The
    result rows become one sink file per hour, regardless of the number of threads.
    """

    def __init__(self, parallelism: int) -> None:
        self._parts = parallelism * PARTS_PER_THREAD if parallelism > 1 else 1
        self._threads = parallelism
        self._pool = ThreadPoolExecutor(parallelism, thread_name_prefix="handler")
        #: Subprocess for the handler, created at first use; [None] if it cannot start.
        self._subprocess: list[SubprocessHandler | None] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for handler in self._subprocess:
            if handler is not None:
                handler.close()

    @property
    def first_rows(self) -> int:
        """Size of the first batch; small, because a message may take seconds."""
        return FIRST_ROWS

    @property
    def least_rows(self) -> int:
        """Minimum size of a batch; 1, because a batch has little overhead."""
        return 1

    @property
    def at_once(self) -> int:
        """Number of parts that run in parallel: one per thread."""
        return self._threads

    def parts(self, rows: int) -> int:
        """Return the number of parts for a batch of ``rows`` messages."""
        return min(self._parts, rows)

    def task(self, work: Work, stopping: threading.Event) -> Callable[[], BatchResult]:
        """Return a function that handles all parts; ``stopping`` cancels parts not yet started."""

        def handled(messages: pa.Table, state: pa.Table | None) -> WalkResult:
            if stopping.is_set():
                raise CancelledError
            return walk(messages, state, rules=work.rules)

        def walk_all() -> BatchResult:
            parts = work.batch.given(work.state)
            handler = self._subprocess_for(work) if work.is_suspect else None
            if handler is not None:
                return _batch_result(work, handler.walk(parts, stopping))
            with rare_collections():
                walked = list(self._pool.map(handled, *zip(*parts, strict=True)))
            return _batch_result(work, walked)

        return walk_all

    def _subprocess_for(self, work: Work) -> SubprocessHandler | None:
        if not self._subprocess:
            self._subprocess.append(start_subprocess(work.rules, threads=self._threads))
        return self._subprocess[0]


def _batch_result(work: Work, walked: list[WalkResult]) -> BatchResult:
    found = [piece for part, each in enumerate(walked) for piece in pieces(part, each)]
    rows = [each.rows for each in walked if each.rows is not None]
    if rows and work.sink is not None:
        files = sink.stage(
            work.sink,
            pa.concat_tables(rows),
            partition_time=work.rules.partition_time,
            epoch=work.epoch,
            batch=work.batch.number,
            messages=work.batch.received,
        )
        found.append(Piece(0, FILES, "", files))
    return gathered(found)


def run_window(
    spec: ConsumerSpec, verbs: Verbs, *, parallelism: int = 8, **terms: Unpack[Terms]
) -> WindowReport:
    """Handle a group's messages on threads, in a window of ``handling.window``.

    A handler that ends its process also ends the window, and all messages are redelivered without
    a counted attempt. The next window runs the handler in a subprocess, where the fatal message is
    isolated and fails alone.

    Args:
        spec: the consumer.
        verbs: flight.client.Client, or the broker itself.
        parallelism: number of threads, each with one message group at a time.
        terms: see handling.window.Terms.
    """
    with ThreadEngine(parallelism) as engine:
        return window.run_window(spec, verbs, engine=engine, **terms)
