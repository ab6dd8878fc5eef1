"""The one place that changes the state: decide, apply, commit, answer (design §3)."""

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa

from rmq_pipeline.broker import event_rows
from rmq_pipeline.broker.event_rows import EventRows
from rmq_pipeline.broker.receiving.consumption import Skipped
from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.stored.placed import Placed
from rmq_pipeline.broker.turns import Turns
from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import RocketMQError, StorageError, StoreFullError
from rmq_pipeline.store.commit_log import CommitLog
from rmq_pipeline.store.frame_builder import FrameBuilder

log = logging.getLogger(__name__)

MESSAGES, EVENTS, KEYED_STATE = 1, 2, 3
#: Requests that share a frame at most, and its size: a frame's answers all wait for its sync.
FRAME_REQUESTS = 1024
FRAME_BYTES = 16 * 1024 * 1024
#: After a full disk, for how long sends are refused without another try.
FULL_PAUSE_MS = 1000
#: What a section takes beside its columns, and an event beside its texts; more rather than less.
_SECTION_BYTES = 4096
_EVENT_BYTES = 96


@dataclass(slots=True)
class Decision:
    """What a request does: rows to store, and the answer once they are on disk."""

    answer: Any = None
    placed: list[Placed] = field(default_factory=list)
    events: list[EventRows] = field(default_factory=list)
    keyed_state: list[pa.RecordBatch] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def stores(self) -> bool:
        """Whether anything is to be stored."""
        return bool(self.placed or self.events or self.keyed_state)

    def frame_bytes(self) -> int:
        """What of a frame it takes, at most."""
        batches = [*(placed.batch for placed in self.placed), *self.keyed_state]
        events = sum(len(rows) * _EVENT_BYTES + rows.text_bytes() for rows in self.events)
        return events + sum(map(_batch_bytes, batches)) + _SECTION_BYTES


def _batch_bytes(batch: pa.RecordBatch) -> int:
    # Exact: columns share buffers, of nulls for one, which the frame has as often as they do.
    size: int = pa.ipc.get_record_batch_size(batch)
    return _SECTION_BYTES + size


class Request(ABC):
    """A verb's request: ``decide`` is pure and leaves the state as it is."""

    #: Whether it may use the reserve when the disk is full: all but what adds messages may.
    uses_reserve: ClassVar[bool] = True

    def is_bulk(self) -> bool:
        """Whether deciding it takes so long that it should be done beside a write."""
        return False

    @abstractmethod
    def decide(self, state: State, now_ms: int) -> Decision:
        """What to store and answer; raises RocketMQError to refuse."""


class _Pending:
    __slots__ = ("answer", "done", "error", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.answer: Any = None
        self.error: BaseException | None = None
        # A bare lock is the cheapest way to hand one answer to one waiting thread.
        self.done = threading.Lock()
        self.done.acquire()


@dataclass(slots=True)
class _Frame:
    """Requests that were decided together, on the state of this log."""

    log: CommitLog
    number: int
    now_ms: int
    pending: list[_Pending] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    staged: FrameBuilder | None = None
    #: Why it cannot be written: it could not be decided.
    error: Exception | None = None


class Writer:
    """Takes requests from any thread; one frame, one sync, then all its answers.

    One thread at a time decides, and one at a time writes: whoever has the turn. That is the
    writer's own thread for what has queued up; a caller who finds nobody at work sees to its frame
    itself, which spares the two changes of threads that cost as much as a sync.

    A frame of bulk is decided while the one of bulk before it is written. Nobody hears of what it
    does before both are on disk: even an answer that stores nothing waits for the frame before.
    Small requests are decided as late as they can be, so that as many as possible share a frame.
    """

    def __init__(
        self,
        commit_log: CommitLog,
        state: State,
        *,
        clock: Clock,
        committed: Callable[[Iterable[Decision]], None],
        rebuild: Callable[[], tuple[CommitLog, State]],
    ) -> None:
        self.log = commit_log
        self.state = state
        self._clock = clock
        self._committed = committed
        self._rebuild = rebuild
        self._turns = Turns()
        self._queue: queue.SimpleQueue[list[_Pending] | None] = queue.SimpleQueue()
        self._full_until_ms = 0
        #: What the decisions of the frame being built take, at most.
        self._frame_bytes = 0
        self._fatal: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rmq-writer", daemon=True)

    def start(self) -> None:
        """Begin to take requests."""
        self._thread.start()

    def submit(self, request: Request) -> Any:
        """The answer to a request, once what it stores is on disk."""
        pending = _Pending(request)
        if not self._write_here(pending):
            self._put([pending])
            pending.done.acquire()
        if pending.error is not None:
            raise pending.error
        return pending.answer

    def submit_together(self, requests: Sequence[Request]) -> list[Any]:
        """The answers to requests that share one frame; an error takes its answer's place."""
        together = [_Pending(request) for request in requests]
        self._put(together)
        for pending in together:
            pending.done.acquire()
        return [p.answer if p.error is None else p.error for p in together]

    def _write_here(self, pending: _Pending) -> bool:
        """Write a frame in the caller's thread, if nobody else is at work.

        Not in the main thread: a signal handler (Ctrl-C) may raise in the middle of anything there.
        """
        if threading.get_ident() == threading.main_thread().ident or not self._queue.empty():
            return False
        number = self._turns.try_take(bulk=pending.request.is_bulk())
        if number is None:
            return False
        self._frame([pending], number)
        return True

    def _put(self, together: list[_Pending]) -> None:
        self._check_open()
        self._queue.put(together)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("The broker is closed.")
        self._check_usable()

    def _check_usable(self) -> None:
        if self._fatal is not None:
            raise StorageError(f"The broker's store has failed: {self._fatal}")

    def close(self) -> None:
        """Answer what is queued, then end the thread."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._turns.close()  # a caller may be at work

    def _run(self) -> None:
        closing = False
        while not closing:
            together = self._queue.get()
            closing = together is None
            while together:
                bulk = any(pending.request.is_bulk() for pending in together)
                number = self._turns.take(bulk=bulk)
                closing = closing or self._drain(together)
                together = self._frame(together, number)

    def _drain(self, together: list[_Pending]) -> bool:
        """Add what has queued up; whether the end of it was there."""
        while len(together) < FRAME_REQUESTS:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return False
            if item is None:
                return True
            together.extend(item)
        return False

    def _frame(self, together: list[_Pending], number: int) -> list[_Pending]:
        """One frame of these requests, decided and then written; those that did not fit in."""
        now_ms = max(self._clock.now_ms(), self.state.last_at_ms)
        frame = _Frame(self.log, number, now_ms)
        try:
            self._decide_some(frame, together)
        except Exception as error:  # noqa: BLE001 whatever it was, the state is not to be used
            frame.error = error
        self._turns.decided()
        self._turns.wait_to_write(number)
        written = self._write(frame)
        self._turns.written()
        for pending in frame.pending:
            pending.done.release()
        if written and frame.decisions:
            self._committed(frame.decisions)
        return together[len(frame.pending) :]

    def _decide_some(self, frame: _Frame, together: list[_Pending]) -> None:
        self._frame_bytes = 0
        for pending in together:
            frame.pending.append(pending)
            self._check_usable()
            decision = self._decide(pending, frame)
            if decision is not None and decision.stores():
                frame.decisions.append(decision)
            if self.log.staged_bytes() > FRAME_BYTES:
                break
        events = [rows for decision in frame.decisions for rows in decision.events]
        if events:
            self.log.stage_payload(EVENTS, event_rows.to_payload(events))
        frame.staged = self.log.take()

    def _write(self, frame: _Frame) -> bool:
        """Write a frame in its turn; whether that worked."""
        try:
            if frame.error is not None:
                raise frame.error
            if frame.log is not self.log:
                raise StorageError("A frame that was decided before this one was not committed.")
            self._check_usable()
            assert frame.staged is not None
            frame.log.write(frame.staged)
        except Exception as error:  # noqa: BLE001 whatever it was, the frame is not on disk
            self._fail(frame, error)
            return False
        return True

    def _decide(self, pending: _Pending, frame: _Frame) -> Decision | None:
        request, now_ms = pending.request, frame.now_ms
        try:
            if now_ms < self._full_until_ms and not request.uses_reserve:
                raise StoreFullError("The disk is full.")
            decision = request.decide(self.state, now_ms)
        except RocketMQError as error:
            pending.error = error
            return None
        except Exception as error:
            log.exception("A request could not be decided; nothing was changed.")
            pending.error = error
            return None
        if decision.stores():
            pending.error = self._make_room(decision, request, frame=frame)
            if pending.error is not None:
                return None
        self._apply(decision)
        pending.answer = decision.answer
        return decision

    def _make_room(
        self, decision: Decision, request: Request, *, frame: _Frame
    ) -> StoreFullError | None:
        """See to it that the frame can be written with this in it; why that cannot be.

        Later there would be a state to undo.
        """
        needed = self._frame_bytes + decision.frame_bytes()
        if self.log.needs_file(needed) and not self._turns.wait_to_write(frame.number):
            raise StorageError("A frame that was decided before this one was not committed.")
        try:
            self.log.make_room(frame_bytes=needed, use_reserve=request.uses_reserve)
        except StoreFullError as error:
            if not request.uses_reserve:
                self._full_until_ms = frame.now_ms + FULL_PAUSE_MS
            return error
        self._frame_bytes = needed
        return None

    def _apply(self, decision: Decision) -> None:
        for placed in decision.placed:
            position = self.log.stage(MESSAGES, placed.batch)
            self.state.append(placed, position)
        for events in decision.events:
            self.state.apply(events)
        for skipped in decision.skipped:
            self.state.learn(skipped)
        for batch in decision.keyed_state:
            self.log.stage(KEYED_STATE, batch)

    def _fail(self, frame: _Frame, error: Exception) -> None:
        """Answer an error to all, and make the state again what is on disk.

        In the frame's turn to write: all before it are written, and none after it is.
        """
        if isinstance(error, StoreFullError):
            self._full_until_ms = frame.now_ms + FULL_PAUSE_MS
        answer = error if isinstance(error, RocketMQError) else StorageError(str(error))
        for pending in frame.pending:
            # A refusal, too: it was decided on what is not on disk.
            pending.answer, pending.error = None, answer
        if frame.log is not self.log or self._fatal is not None:
            return
        if not isinstance(error, StoreFullError):
            text = "A frame was not committed; the state is rebuilt from disk."
            log.error(text, exc_info=error)
        self._turns.stop()
        try:
            self.log, self.state = self._rebuild()
        except Exception as fatal:
            log.exception("The state could not be rebuilt.")
            self._fatal = fatal
        finally:
            self._turns.go_on()
