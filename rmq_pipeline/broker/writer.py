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
from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import RocketMQError, StorageError, StoreFullError
from rmq_pipeline.store.commit_log import CommitLog

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
#: Slices are counted as the whole they are of, up to this size.
_LOOSE_BYTES = 4 * 1024 * 1024


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
    size: int = batch.get_total_buffer_size()
    if size >= _LOOSE_BYTES:
        size = batch.nbytes
    return _SECTION_BYTES + size


class Request(ABC):
    """A verb's request: ``decide`` is pure and leaves the state as it is."""

    #: Whether it may use the reserve when the disk is full: all but what adds messages may.
    uses_reserve: ClassVar[bool] = True

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


class Writer:
    """Takes requests from any thread; one frame, one sync, then all its answers.

    One thread at a time writes: whoever has the turn. That is the writer's own thread for what has
    queued up; a caller who finds nobody at work writes its frame itself, which spares the two
    changes of threads that cost as much as a sync.
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
        self._turn = threading.Lock()
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
        if not self._turn.acquire(blocking=False):
            return False
        try:
            self._check_open()
            self._frame([pending])
        finally:
            self._turn.release()
        return True

    def _put(self, together: list[_Pending]) -> None:
        self._check_open()
        self._queue.put(together)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError("The broker is closed.")
        if self._fatal is not None:
            raise StorageError(f"The broker's store has failed: {self._fatal}")

    def close(self) -> None:
        """Answer what is queued, then end the thread."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        with self._turn:  # a caller may be at work
            pass

    def _run(self) -> None:
        closing = False
        while not closing:
            item = self._queue.get()
            with self._turn:
                together: list[_Pending] = []
                while item is not None:
                    together.extend(item)
                    if len(together) >= FRAME_REQUESTS:
                        break
                    try:
                        item = self._queue.get_nowait()
                    except queue.Empty:
                        break
                closing = item is None
                while together:
                    together = self._frame(together)

    def _frame(self, together: list[_Pending]) -> list[_Pending]:
        """One frame of these requests; those that did not fit in."""
        now_ms = max(self._clock.now_ms(), self.state.last_at_ms)
        decisions: list[Decision] = []
        answered = self._frame_bytes = 0
        try:
            for pending in together:
                answered += 1
                decision = self._decide(pending, now_ms)
                if decision is not None and decision.stores():
                    decisions.append(decision)
                if self.log.staged_bytes() > FRAME_BYTES:
                    break
            events = [rows for decision in decisions for rows in decision.events]
            if events:
                self.log.stage_payload(EVENTS, event_rows.to_payload(events))
            if decisions:
                self.log.commit(use_reserve=True)  # who may not was refused before
        except Exception as error:  # noqa: BLE001 whatever it was, the frame is not on disk
            self._fail(together, error, now_ms=now_ms)
            return []
        for pending in together[:answered]:
            pending.done.release()
        if decisions:
            self._committed(decisions)
        return together[answered:]

    def _decide(self, pending: _Pending, now_ms: int) -> Decision | None:
        request = pending.request
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
            pending.error = self._make_room(decision, request, now_ms=now_ms)
            if pending.error is not None:
                return None
        self._apply(decision)
        pending.answer = decision.answer
        return decision

    def _make_room(
        self, decision: Decision, request: Request, *, now_ms: int
    ) -> StoreFullError | None:
        """See to it that the frame can be written with this in it; why that cannot be.

        Later there would be a state to undo.
        """
        needed = self._frame_bytes + decision.frame_bytes()
        try:
            self.log.make_room(frame_bytes=needed, use_reserve=request.uses_reserve)
        except StoreFullError as error:
            if not request.uses_reserve:
                self._full_until_ms = now_ms + FULL_PAUSE_MS
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

    def _fail(self, together: list[_Pending], error: Exception, *, now_ms: int) -> None:
        """Answer an error to all, and make the state again what is on disk."""
        if isinstance(error, StoreFullError):
            self._full_until_ms = now_ms + FULL_PAUSE_MS
        else:
            text = "A frame was not committed; the state is rebuilt from disk."
            log.error(text, exc_info=error)
        answer = error if isinstance(error, RocketMQError) else StorageError(str(error))
        try:
            self.log, self.state = self._rebuild()
        except Exception as fatal:
            log.exception("The state could not be rebuilt.")
            self._fatal = fatal
        for pending in together:
            if pending.error is None:
                pending.error = answer
            if pending.done.locked():
                pending.done.release()
