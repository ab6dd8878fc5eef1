"""Thread engine: handles the message groups of a window on threads of this process.

A handler that ends its process also ends a window on threads, and would end the next one again. So
a window that follows an unclosed one runs its handler in a subprocess. If the subprocess dies, the
window bisects the batch, as Spark windows do, until the fatal message fails alone.
"""

import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa
from typing_extensions import Unpack

from rmq_pipeline.handling import sink, window
from rmq_pipeline.handling.executor import Work
from rmq_pipeline.handling.group_walk import Rules, rare_collections, walk
from rmq_pipeline.handling.handler import Handler, Outcome
from rmq_pipeline.handling.results import (
    FILES,
    BatchResult,
    Piece,
    WalkResult,
    WindowReport,
    WorkerDiedError,
    gathered,
    pieces,
)
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.handling.window import Terms
from rmq_pipeline.verbs import Verbs

log = logging.getLogger(__name__)

#: For each part: its messages, and the keyed state of their message groups.
Parts = list[tuple[pa.Table, pa.Table | None]]

#: Interval between two checks whether the window wants to stop.
_LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Named:
    """Handler that another process imports by its name, also if it is decorated."""

    module: str
    name: str

    def __call__(self, messages: pa.Table, state: pa.Table) -> Outcome:
        """Call the handler."""
        return self.found()(messages, state)

    def found(self) -> Handler:
        """Import the handler; if the name belongs to a consumer, return the consumer's handler."""
        here: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            here = getattr(here, part)
        handler: Handler = here.spec.handler if hasattr(here, "spec") else here
        return handler


def sendable(rules: Rules) -> Rules | None:
    """Return the rules in a form that can be pickled; None if their handler cannot be."""
    handler = rules.handler
    named = Named(getattr(handler, "__module__", ""), getattr(handler, "__qualname__", ""))
    try:
        if named.found() is handler:
            return replace(rules, handler=named)
    except (ImportError, AttributeError, ValueError):
        pass
    try:
        pickle.dumps(rules)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return rules


def start_subprocess(rules: Rules, *, threads: int) -> "SubprocessHandler | None":
    """Start a subprocess for a handler; return None with a warning if it cannot be imported."""
    sent = sendable(rules)
    handler = SubprocessHandler(sent, threads=threads) if sent is not None else None
    if handler is not None and handler.start():
        return handler
    log.warning(
        "The last window never closed. If its handler crashed the process, it will crash this one"
        " too: a subprocess cannot import %r. Make it a function of a module.",
        rules.handler,
    )
    return None


class SubprocessHandler:
    """Subprocess that handles parts on its own threads; restarted after it has died."""

    def __init__(self, rules: Rules, *, threads: int) -> None:
        self._rules, self._threads = rules, threads
        self._process: multiprocessing.process.BaseProcess | None = None
        self._line: Connection | None = None

    def start(self) -> bool:
        """Start the subprocess if necessary; return True if it could import its handler."""
        if self._process is not None:
            return True
        # A fork could copy locks that other threads hold, so the subprocess is spawned.
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(theirs, self._rules),
            kwargs={"threads": self._threads},
            name="rmq-handler",
        )
        self._process.start()
        theirs.close()
        try:
            self._line.recv()
        except (EOFError, OSError):
            self.close()
            return False
        return True

    def walk(self, parts: Parts, stopping: threading.Event) -> list[WalkResult]:
        """Handle all parts and return their results.

        Raises:
            WorkerDiedError: the subprocess died.
            CancelledError: ``stopping`` was set.
            RuntimeError: the walk raised in the subprocess.
        """
        if not self.start():
            raise WorkerDiedError("the handler's process died and cannot be restarted")
        assert self._process is not None
        assert self._line is not None
        try:
            self._line.send(parts)
            while not wait([self._line, self._process.sentinel], _LOOK_S):
                if stopping.is_set():
                    self.close()
                    raise CancelledError
            if not self._line.poll():
                raise EOFError  # a child of the subprocess may keep the pipe open
            walked, error = self._line.recv()
        except (EOFError, OSError) as gone:
            self._process.join()
            code = self._process.exitcode
            self.close()
            raise WorkerDiedError(f"the handler's process died: {_described(code)}") from gone
        if error:
            raise RuntimeError(error)
        found: list[WalkResult] = walked
        return found

    def close(self) -> None:
        """Kill the subprocess."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._line is not None:
            self._line.close()
        self._process = self._line = None


def _described(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _serve(line: Connection, rules: Rules, *, threads: int) -> None:
    """Handle parts in the subprocess until the window closes the pipe."""
    threading.Thread(target=_end_with_the_window, name="rmq-window", daemon=True).start()
    if isinstance(rules.handler, Named):
        rules = replace(rules, handler=rules.handler.found())
    line.send("ready")
    with ThreadPoolExecutor(threads, thread_name_prefix="handler") as pool:
        while True:
            try:
                parts: Parts = line.recv()
            except EOFError:
                return
            try:
                with rare_collections():
                    answer = list(pool.map(partial(_walk, rules), parts)), ""
            except Exception as error:  # noqa: BLE001 - raised again in the window
                answer = [], f"{type(error).__name__}: {error}"
            line.send(answer)


def _end_with_the_window() -> None:
    """Exit when the process of the window exits, even in the middle of a part.

    A killed window closes nothing, and its messages go to the next window. Without this exit both
    windows would handle the rest of the part at the same time.
    """
    window = multiprocessing.parent_process()
    assert window is not None
    wait([window.sentinel])
    os._exit(1)


def _walk(rules: Rules, part: tuple[pa.Table, pa.Table | None]) -> WalkResult:
    return walk(*part, rules=rules)


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
            with work.span.current():
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
