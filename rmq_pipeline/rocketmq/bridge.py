"""Calls from the event loop to the broker that do not block the loop."""

import asyncio
import heapq
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, Final, TypeVar

from rmq_pipeline.broker.decide.request import Request
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.writer import Done
from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import RocketMQError

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Threads for verbs that read or wait; sends and acks go to the writer without a thread.
_THREADS: Final = 8


class Bridge:
    """The broker's interface for coroutines of one event loop."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="rmq-grpc")
        #: Answers from the writer for the loop, which is woken once per frame.
        self._answers: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._woken = False
        #: Requests of the current turn of the loop.
        self._joining: list[tuple[Request, Done]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def submit(self, request: Request) -> "asyncio.Future[Any]":
        """Return a future of the answer, which is set once the request is on disk.

        Call it from the loop's thread. The requests of one turn of the loop wake the writer once
        and share a frame.
        """
        future = self._loop.create_future()
        if request.is_bulk():
            self._engine.post(request, self._teller(future))
            return future
        if not self._joining:
            self._loop.call_soon(self._post)
        self._joining.append((request, self._teller(future)))
        return future

    def _post(self) -> None:
        joining, self._joining = self._joining, []
        try:
            self._engine.post_together(joining)
        except RocketMQError as error:
            for _, answered in joining:
                answered(None, error)

    def _teller(self, future: "asyncio.Future[Any]") -> Done:
        """Return the function by which the writer's thread answers a request."""

        def answered(answer: object, error: BaseException | None) -> None:
            # Append before reading the flag: _deliver clears the flag before it empties the queue,
            # so an answer is never left behind.
            self._answers.append((future, answer, error))
            if not self._woken:
                self._woken = True
                self.call_soon(self._deliver)

        return answered

    def _deliver(self) -> None:
        self._woken = False
        while self._answers:
            future, answer, error = self._answers.popleft()
            if future.done():  # the caller has gone
                continue
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)

    async def run(self, function: Callable[..., T], *args: Any, **keywords: Any) -> T:
        """Run a blocking verb in a thread of the pool and return its result."""
        return await self._loop.run_in_executor(self._pool, partial(function, *args, **keywords))

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function in the loop; may be called from any thread."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed, so no caller waits for the answer
            log.debug("an answer came after the endpoint had closed")

    def spawn(self, make: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run a coroutine in the loop without awaiting it; may be called from any thread."""
        self.call_soon(self.start, make)

    def start(self, make: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run a coroutine without awaiting it; call it from the loop's thread."""
        task = self._loop.create_task(make())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task of the gRPC endpoint failed", exc_info=error)

    async def finish(self, timeout_s: float) -> None:
        """Wait until all started coroutines have ended, at most ``timeout_s``."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def close(self) -> None:
        """Shut the pool down; calls that have not started are cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)


log = logging.getLogger(__name__)

#: Pause after an unexpected error, so that a persistent one does not spin.
_PAUSE_S: Final = 0.1


class Timer:
    """A call that is made at its time unless it is cancelled."""

    __slots__ = ("_call", "at_ms")

    def __init__(self, at_ms: int, call: Callable[[], None]) -> None:
        self.at_ms = at_ms
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Drop the call. If the thread has already taken it, it may still run."""
        self._call = None

    def fire(self) -> None:
        """Make the call once; log an error, so that the other timers still run."""
        call, self._call = self._call, None
        if call is None:
            return
        try:
            call()
        except Exception:
            log.exception("A timer's call failed.")


class Timers:
    """Timer thread that calls functions at their time by the broker's clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._condition = threading.Condition()
        self._waiting: list[tuple[int, int, Timer]] = []
        self._serial = count()
        self._closed = False
        self._pause = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rmq-timers", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Make no further calls, and join the thread."""
        with self._condition:
            self._closed = True
            self._pause.set()
            self._condition.notify_all()
        self._thread.join()

    def at(self, at_ms: int, call: Callable[[], None]) -> Timer:
        """Call a function once ``at_ms`` has come; it must hand over its work and return."""
        timer = Timer(at_ms, call)
        with self._condition:
            heapq.heappush(self._waiting, (at_ms, next(self._serial), timer))
            if self._waiting[0][2] is timer:
                self._condition.notify_all()
        return timer

    def _run(self) -> None:
        while not self._closed:
            try:
                due = self._next()
            except Exception:  # without this thread no poll ends and no lease is renewed
                log.exception("The timer thread failed; it continues.")
                self._pause.wait(_PAUSE_S)
                continue
            for timer in due:
                timer.fire()

    def _next(self) -> list[Timer]:
        """Wait for the next due timers and return them; an empty list after ``close``."""
        with self._condition:
            while not self._closed:
                now_ms, due = self._clock.now_ms(), []
                while self._waiting and self._waiting[0][0] <= now_ms:
                    due.append(heapq.heappop(self._waiting)[2])
                if due:
                    return due
                first = self._waiting[0][0] if self._waiting else None
                self._clock.wait_until(self._condition, first)
        return []
