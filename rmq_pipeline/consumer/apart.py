"""The handler in a process of its own, which may end without ending the window.

Spark finds out which message ends its worker; threads end with the whole window, and so would the
next one. So a window that follows one which never closed has its handler here, and what ends this
process is found as Spark's windows find it: in halves, down to the message, which fails alone.
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
from rmq_pipeline.handling.harvest import Walked
from rmq_pipeline.handling.worked import WorkerDiedError

log = logging.getLogger(__name__)

#: Messages of each part, and the state of their message groups.
Parts = list[tuple[pa.Table, pa.Table | None]]

#: How long it may be missed that nobody wants the result any more.
_LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Named:
    """A handler that another process finds by its name; one that was decorated, too."""

    module: str
    name: str

    def __call__(self, messages: pa.Table, state: pa.Table) -> Outcome:
        """Call it."""
        return self.found()(messages, state)

    def found(self) -> Handler:
        """The function itself: a consumer's, where the name is that of what it was made into."""
        here: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            here = getattr(here, part)
        handler: Handler = here.spec.handler if hasattr(here, "spec") else here
        return handler


def sendable(rules: Rules) -> Rules | None:
    """The rules as another process can have them; None: their handler cannot be found there."""
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


def begun(rules: Rules, *, threads: int) -> "Apart | None":
    """A process for a handler; None, and a warning, where it cannot be found there."""
    sent = sendable(rules)
    apart = Apart(sent, threads=threads) if sent is not None else None
    if apart is not None and apart.is_begun():
        return apart
    log.warning(
        "The window before never closed. If its handler has ended its process, it will end this"
        " one, too: %r cannot be found by another process. Make it a function of a module.",
        rules.handler,
    )
    return None


class Apart:
    """A process that walks parts on threads of its own; begun anew when it has ended."""

    def __init__(self, rules: Rules, *, threads: int) -> None:
        self._rules, self._threads = rules, threads
        self._process: multiprocessing.process.BaseProcess | None = None
        self._line: Connection | None = None

    def is_begun(self) -> bool:
        """Begin, unless it was; whether it has its handler."""
        if self._process is not None:
            return True
        # Not a fork: this process has threads, and each may hold a lock that a fork would keep.
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

    def walk(self, parts: Parts, stopping: threading.Event) -> list[Walked]:
        """Walk all parts.

        Raises:
            WorkerDiedError: the process has ended meanwhile.
            CancelledError: ``stopping`` was set.
        """
        if not self.is_begun():
            raise WorkerDiedError("the handler has ended its process, and no other begins")
        assert self._process is not None
        assert self._line is not None
        try:
            self._line.send(parts)
            while not wait([self._line, self._process.sentinel], _LOOK_S):
                if stopping.is_set():
                    self.close()
                    raise CancelledError
            if not self._line.poll():
                raise EOFError  # a child of it may hold the other end
            walked, error = self._line.recv()
        except (EOFError, OSError) as gone:
            self._process.join()
            code = self._process.exitcode
            self.close()
            raise WorkerDiedError(f"the handler has ended its process: {_told(code)}") from gone
        if error:
            raise RuntimeError(error)
        found: list[Walked] = walked
        return found

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._line is not None:
            self._line.close()
        self._process = self._line = None


def _told(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _serve(line: Connection, rules: Rules, *, threads: int) -> None:
    """What the other process does, until the window is gone."""
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
    """End this process when the window's does, in the middle of a part as well.

    A window that is killed closes nothing. Its messages go to the next one, and what is left of
    the part would be handled twice, side by side.
    """
    window = multiprocessing.parent_process()
    assert window is not None
    wait([window.sentinel])
    os._exit(1)


def _walk(rules: Rules, part: tuple[pa.Table, pa.Table | None]) -> Walked:
    return walk(*part, rules=rules)
