"""From the event loop to the broker and back, without holding the loop up."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.writer import Done, Request
from rmq_pipeline.errors import RocketMQError

log = logging.getLogger(__name__)
T = TypeVar("T")

#: For verbs that read or wait; what comes in masses goes to the writer directly.
_THREADS: Final = 8


class Bridge:
    """The broker for coroutines of one event loop."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="rmq-grpc")
        #: Answers on their way from the writer to the loop: it is woken once for all of a frame.
        self._answers: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._woken = False
        #: Requests of this turn of the loop.
        self._joining: list[tuple[Request, Done]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def submit(self, request: Request) -> "asyncio.Future[Any]":
        """The answer to a request once it is on disk; for the loop's thread.

        What is asked for in one turn of the loop wakes the writer once, and shares a frame.
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
        """What the writer's thread tells an answer to."""

        def answered(answer: object, error: BaseException | None) -> None:
            # First the answer, then the look whether the loop knows: it says that it looks before
            # it does.
            self._answers.append((future, answer, error))
            if not self._woken:
                self._woken = True
                self.call_soon(self._deliver)

        return answered

    def _deliver(self) -> None:
        self._woken = False
        while self._answers:
            future, answer, error = self._answers.popleft()
            if future.done():  # its caller has gone
                continue
            if error is None:
                future.set_result(answer)
            else:
                future.set_exception(error)

    async def run(self, function: Callable[..., T], *args: Any, **keywords: Any) -> T:
        """What a verb that blocks returns, called in a thread of the pool."""
        return await self._loop.run_in_executor(self._pool, partial(function, *args, **keywords))

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Have the loop call a function; from any thread."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody waits any more
            log.debug("an answer came after the door was closed")

    def spawn(self, make: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Have the loop run a coroutine that nobody waits for; from any thread."""
        self.call_soon(self.start, make)

    def start(self, make: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run a coroutine that nobody waits for; in the loop's thread."""
        task = self._loop.create_task(make())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the door has failed", exc_info=error)

    def close(self) -> None:
        """Take nothing more for the pool."""
        self._pool.shutdown(wait=False, cancel_futures=True)
