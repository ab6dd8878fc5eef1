"""A window without a JVM: message groups are handled side by side on threads of this process."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

import pyarrow as pa
from typing_extensions import Unpack

from rmq_pipeline.consumer.apart import Apart, begun
from rmq_pipeline.handling import run, sink
from rmq_pipeline.handling.engine import Work
from rmq_pipeline.handling.group_walk import rare_collections, walk
from rmq_pipeline.handling.harvest import Walked
from rmq_pipeline.handling.report import WindowReport
from rmq_pipeline.handling.run import Terms
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.handling.verbs import Verbs
from rmq_pipeline.handling.worked import FILES, Piece, Worked, gathered, pieces

#: So that a thread whose message groups are done finds others, when those of another take long.
PARTS_PER_THREAD: Final = 8
#: Handlers in Python may well wait for others. Two batches may have been received before the first
#: of them is settled, and one message group is one thread's: of messages that take 37 s each, twice
#: 16 take 1,184 s, and a run is ended after 1,200 s. Where they take 1 ms, it soon has all that a
#: batch may have: 16, 128, 1,024, 8,192, 20,000.
FIRST_ROWS: Final = 16


class ThreadEngine:
    """A context manager: its threads live as long as the window, and so does what is local to them.

    The parts of a micro-batch are whole message groups, so that one has a thread to itself. Their
    rows become one sink file an hour, whatever the number of threads.
    """

    def __init__(self, parallelism: int) -> None:
        self._parts = parallelism * PARTS_PER_THREAD if parallelism > 1 else 1
        self._threads = parallelism
        self._pool = ThreadPoolExecutor(parallelism, thread_name_prefix="handler")
        #: Once it was asked for; None: it cannot be had.
        self._apart: list[Apart | None] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for apart in self._apart:
            if apart is not None:
                apart.close()

    @property
    def first_rows(self) -> int:
        """Few: each may take seconds."""
        return FIRST_ROWS

    @property
    def least_rows(self) -> int:
        """One: a batch costs next to nothing beside its calls."""
        return 1

    @property
    def at_once(self) -> int:
        """A part for each thread."""
        return self._threads

    def parts(self, rows: int) -> int:
        """Some for each thread."""
        return min(self._parts, rows)

    def task(self, work: Work, stopping: threading.Event) -> Callable[[], Worked]:
        """The walks of all parts; once it is to stop, no further one is begun."""

        def handled(messages: pa.Table, state: pa.Table | None) -> Walked:
            if stopping.is_set():
                raise CancelledError
            return walk(messages, state, rules=work.rules)

        def walk_all() -> Worked:
            parts = work.batch.given(work.state)
            apart = self._apart_for(work) if work.is_suspect else None
            if apart is not None:
                return _worked(work, apart.walk(parts, stopping))
            with rare_collections():
                walked = list(self._pool.map(handled, *zip(*parts, strict=True)))
            return _worked(work, walked)

        return walk_all

    def _apart_for(self, work: Work) -> Apart | None:
        if not self._apart:
            self._apart.append(begun(work.rules, threads=self._threads))
        return self._apart[0]


def _worked(work: Work, walked: list[Walked]) -> Worked:
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
    """Handle a group's messages on threads, in a window of ``handling.run``.

    A handler that ends its process ends the window: no message is to blame, and all come again. The
    next window has its handler in another process, so that the message it is is found, and fails.

    Args:
        spec: the consumer.
        verbs: flight.client.Client, or the broker itself.
        parallelism: threads, each with one message group at a time.
        terms: as handling.run.Terms says.
    """
    with ThreadEngine(parallelism) as engine:
        return run.run_window(spec, verbs, engine=engine, **terms)
