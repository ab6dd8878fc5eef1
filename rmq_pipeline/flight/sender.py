"""Sends in the background: tables queued during one call are sent together in the next."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import pyarrow as pa

from rmq_pipeline import errors, limits
from rmq_pipeline.flight import wire

log = logging.getLogger(__name__)

#: Limits of one call; a single larger table is still sent.
CALL_BYTES = 8 * limits.MIB
CALL_ROWS = 20_000
#: ``put`` blocks while more than this is queued.
WAITING_BYTES = 64 * limits.MIB

Send = Callable[[str, pa.Table], pa.Table]


@dataclass(frozen=True)
class _Waiting:
    topic: str
    messages: pa.Table
    future: "Future[pa.Table] | None"
    bytes: int


class Sender:
    """Thread that sends tables in the order of ``put``, and combines neighbours."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._queue: deque[_Waiting] = deque()
        self._bytes = 0
        self._closing = False
        self._then: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="rmq-sender", daemon=True)
        self._thread.start()

    def put(self, topic: str, messages: pa.Table, *, future: "Future[pa.Table] | None") -> None:
        """Queue a table; block while WAITING_BYTES are queued. Without a future, log failures.

        The callback of a future runs in the sending thread, so there ``put`` does not block.
        """
        messages = wire.as_table("messages", messages)
        waiting = _Waiting(topic, messages, future, messages.nbytes)
        with self._changed:
            if not self._is_here():
                self._changed.wait_for(lambda: self._bytes < WAITING_BYTES or self._closing)
            if self._closing:
                raise errors.BrokerUnavailableError(
                    "This client is closed.", remedy="Make a new client."
                )
            self._queue.append(waiting)
            self._bytes += waiting.bytes
            self._changed.notify_all()

    def close(self, then: Callable[[], None] = lambda: None) -> None:
        """Send all queued tables, then call ``then`` and end the thread.

        The callback of a future runs in the sending thread, so there ``close`` does not block.
        """
        with self._changed:
            self._closing = True
            if self._is_here():
                self._then = then
            self._changed.notify_all()
        if not self._is_here():
            self._thread.join()
            then()

    def _is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        while neighbours := self._take():
            if wanted := [waiting for waiting in neighbours if _begin(waiting)]:
                self._deliver(wanted)
        self._then()

    def _take(self) -> list[_Waiting]:
        """Return the first tables that can share a call; none if the sender is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or self._closing)
            taken: list[_Waiting] = []
            size = rows = 0
            while self._queue:
                next_ = self._queue[0]
                size, rows = size + next_.bytes, rows + next_.messages.num_rows
                if taken and not (
                    size <= CALL_BYTES and rows <= CALL_ROWS and _go_together(taken[0], next_)
                ):
                    break
                taken.append(self._queue.popleft())
            self._bytes -= sum(waiting.bytes for waiting in taken)
            self._changed.notify_all()
        return taken

    def _deliver(self, together: list[_Waiting]) -> None:
        try:
            sent = self._send(together[0].topic, pa.concat_tables([w.messages for w in together]))
        except errors.RequestError as error:
            # The request was refused as a whole and nothing is stored. Sent singly, only the faulty
            # table is refused.
            if len(together) == 1:
                _fail(together[0], error)
            for waiting in together if len(together) > 1 else ():
                self._deliver([waiting])
        except Exception as error:  # noqa: BLE001 - the error belongs to the futures
            for waiting in together:
                _fail(waiting, error)
        else:
            row = 0
            for waiting in together:
                if waiting.future is not None:
                    waiting.future.set_result(sent.slice(row, waiting.messages.num_rows))
                row += waiting.messages.num_rows


def _begin(waiting: _Waiting) -> bool:
    """Return False if the future was cancelled; otherwise it cannot be cancelled any more."""
    return waiting.future is None or waiting.future.set_running_or_notify_cancel()


def _go_together(first: _Waiting, other: _Waiting) -> bool:
    return first.topic == other.topic and first.messages.schema.equals(other.messages.schema)


def _fail(waiting: _Waiting, error: Exception) -> None:
    if waiting.future is not None:
        waiting.future.set_exception(error)
    else:
        log.warning("one-way send to %s failed: %s", waiting.topic, error)
