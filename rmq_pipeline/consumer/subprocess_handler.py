"""Subprocess for a handler, which may crash without ending the window.

A handler that ends its process also ends a window on threads, and would end the next one again. So
a window that follows an unclosed one runs its handler in this subprocess. If the subprocess dies,
the window bisects the batch, as Spark windows do, until the fatal message fails alone.
"""

import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline.handling.group_walk import Rules, rare_collections, walk
from rmq_pipeline.handling.handler import Handler, Outcome
from rmq_pipeline.handling.results import WalkResult, WorkerDiedError

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
