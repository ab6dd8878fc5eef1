"""Threads of the Flight endpoint: one per running call."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, Final

from typing_extensions import override

log = logging.getLogger(__name__)

#: A thread ends after this long without a call.
_IDLE_S: Final = 10.0


class Threads(Executor):
    """Thread pool for calls: one thread per running call, and some idle threads.

    The pool of the standard library never shrinks below the maximum number of concurrent calls.
    """

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._idle = 0
        self._open = 0

    @override
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def task() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - the error belongs to the future
                future.set_exception(error)

        with self._lock:
            self._open += 1
            is_taken = self._idle > 0
            self._idle -= is_taken
            self._tasks.put(task)
        if not is_taken:
            self._start()
        return future

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name="rmq-flight", daemon=True).start()
        except RuntimeError as error:
            # This is the only serving thread of gRPC, and an exception would end it. The task stays
            # queued, and the next thread that becomes free takes it.
            log.warning("no thread for a call: %s", error)
            with self._lock:
                self._idle -= 1

    def wait(self, timeout_s: float) -> None:
        """Wait until no task is running, or the time is up."""
        with self._ended:
            self._ended.wait_for(lambda: not self._open, timeout_s)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            task()
            del task  # otherwise an idle thread keeps the tables of its last call
            with self._lock:
                self._idle += 1
                self._open -= 1
                if not self._open:
                    self._ended.notify_all()

    def _next(self) -> Callable[[], None] | None:
        while True:
            try:
                return self._tasks.get(timeout=self._idle_s)
            except Empty:
                with self._lock:
                    # A queued task was assigned to an idle thread, maybe to this one.
                    if self._tasks.empty():
                        self._idle -= 1
                        return None
