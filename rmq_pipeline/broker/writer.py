"""The one place that changes the state: decide, apply, commit, answer (design §3)."""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rmq_pipeline.broker import event_rows
from rmq_pipeline.broker.pending import Done, Pending, Posted, is_bulk, small_first
from rmq_pipeline.broker.request import Decision, Request
from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.turns import Turns
from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import RequestError, RocketMQError, StorageError, StoreFullError
from rmq_pipeline.store.commit_log import CommitLog
from rmq_pipeline.store.frame import FRAME_BYTES_MAX
from rmq_pipeline.store.frame_builder import FrameBuilder

__all__ = ["EVENTS", "MESSAGES", "Decision", "Done", "Request", "Writer"]

log = logging.getLogger(__name__)

MESSAGES, EVENTS, KEYED_STATE = 1, 2, 3
#: Requests that share a frame at most, and its size: a frame's answers all wait for its sync.
FRAME_REQUESTS = 1024
FRAME_BYTES = 16 * 1024 * 1024
#: After a full disk, for how long sends are refused without another try.
FULL_PAUSE_MS = 1000


@dataclass(slots=True)
class _Frame:
    """Requests that were decided together, on the state of this log."""

    log: CommitLog
    number: int
    now_ms: int
    pending: list[Pending] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    staged: FrameBuilder | None = None
    #: Why it cannot be written: it could not be decided.
    error: Exception | None = None


class Writer:
    """Takes requests from any thread; one frame, one sync, then all its answers.

    One thread at a time decides, and one at a time writes: whoever has the turn. That is the
    writer's own thread for what has queued up; a caller who finds nobody at work sees to its frame
    itself, which spares the two changes of threads that cost as much as a sync.

    A frame of bulk is decided while the one of bulk before it is written: a second thread writes
    what the first has decided when more waits. Nobody hears of what it does before both are on
    disk: even an answer that stores nothing waits for the frame before.
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
        self._queue: queue.SimpleQueue[list[Pending] | None] = queue.SimpleQueue()
        self._full_until_ms = 0
        #: What the decisions of the frame being built take, at most.
        self._frame_bytes = 0
        self._fatal: BaseException | None = None
        self._closed = False
        #: Held to put something in the queue: what is there before its end is answered.
        self._entering = threading.Lock()
        #: Frames of bulk that were decided, while the thread that did goes on to the next.
        self._decided: queue.SimpleQueue[_Frame | None] = queue.SimpleQueue()
        self._threads = (
            threading.Thread(target=self._run, name="rmq-writer", daemon=True),
            threading.Thread(target=self._write_bulk, name="rmq-bulk-writer", daemon=True),
        )

    def start(self) -> None:
        """Begin to take requests."""
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request) -> Any:
        """The answer to a request, once what it stores is on disk."""
        pending = Pending(request)
        if not self._write_here(pending):
            self._put([pending])
        pending.done.acquire()
        if pending.error is not None:
            raise pending.error
        return pending.answer

    def post(self, request: Request, done: Done) -> None:
        """Have a request decided and stored by and by; ``done`` is told what ``submit`` answers.

        Does not wait, and does no work of the writer's: for threads that must not be held up.
        """
        self._put([Posted(request, done)])

    def post_together(self, requests: Iterable[tuple[Request, Done]]) -> None:
        """The same for several requests, which share a frame as far as they fit."""
        self._put([Posted(request, done) for request, done in requests])

    def submit_together(self, requests: Sequence[Request]) -> list[Any]:
        """The answers to requests that share one frame; an error takes its answer's place."""
        together = [Pending(request) for request in requests]
        # A copy: the writer adds to its list what has queued up behind it, for others to wait for.
        self._put(list(together))
        for pending in together:
            pending.done.acquire()
        return [p.answer if p.error is None else p.error for p in together]

    def _write_here(self, pending: Pending) -> bool:
        """Write a frame in the caller's thread, if nobody else is at work.

        Not in the main thread: a signal handler (Ctrl-C) may raise in the middle of anything there.
        """
        if threading.get_ident() == threading.main_thread().ident or not self._queue.empty():
            return False
        number = self._turns.try_take(bulk=pending.request.is_bulk())
        if number is None:
            return False
        self._write_or_leave(self._frame_of([pending], number))
        return True

    def _put(self, together: list[Pending]) -> None:
        with self._entering:
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
        """Answer what is queued, then end the threads."""
        with self._entering:
            self._closed = True
            self._queue.put(None)
        deciding, writing = self._threads
        deciding.join()
        self._turns.close()  # a caller may be at work
        self._decided.put(None)
        writing.join()

    def _run(self) -> None:
        # Bulk lets small requests go before it once: more often it might wait for ever.
        closing = passed = False
        while not closing:
            together = self._queue.get()
            closing = together is None
            while together:
                bulk = is_bulk(together)
                number = self._turns.take(bulk=bulk)
                closing = closing or self._drain(together)
                small = 0 if passed else small_first(together)
                passed = small > 0
                frame = self._frame_of(together[:small] or together, number)
                together = together[len(frame.pending) :]
                more = bool(together) or not self._queue.empty()
                self._write_or_leave(frame, leave=bulk and more)

    def _write_or_leave(self, frame: _Frame, *, leave: bool = False) -> None:
        """Write a decided frame, or leave it to the thread that goes from one frame to the next.

        That thread need not be woken for it, and keeps the disk busy: what comes after a frame that
        is still to be written is left to it, and bulk when there is more to decide.
        """
        leave = leave or self._turns.has_before(frame.number)
        if leave:
            self._decided.put(frame)  # before anybody decides the next one: it takes them in order
        self._turns.decided()
        if not leave:
            self._finish(frame)

    def _write_bulk(self) -> None:
        while (frame := self._decided.get()) is not None:
            self._finish(frame)

    def _drain(self, together: list[Pending]) -> bool:
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

    def _frame_of(self, together: list[Pending], number: int) -> _Frame:
        """A frame of the first of these requests, decided."""
        now_ms = max(self._clock.now_ms(), self.state.last_at_ms)
        frame = _Frame(self.log, number, now_ms)
        try:
            self._decide_some(frame, together)
        except Exception as error:  # noqa: BLE001 whatever it was, the state is not to be used
            frame.error = error
        return frame

    def _finish(self, frame: _Frame) -> None:
        """Write a frame in its turn, and answer."""
        self._turns.wait_to_write(frame.number)
        written = self._write(frame)
        self._turns.written()
        for pending in frame.pending:
            pending.finish()
        if written and frame.decisions:
            try:
                self._committed(frame.decisions)
            except Exception:
                log.exception("Somebody could not be told of a frame, which is stored.")

    def _decide_some(self, frame: _Frame, together: list[Pending]) -> None:
        self._frame_bytes = 0
        for pending in together:
            frame.pending.append(pending)
            self._check_usable()
            decision = self._decide(pending, frame)
            if decision is not None and decision.stores():
                frame.decisions.append(decision)
            if self._frame_bytes > FRAME_BYTES:  # with its events, which are staged at the end
                break
        events = [rows for decision in frame.decisions for rows in decision.events]
        if events:
            self.log.stage_payload(EVENTS, (event_rows.to_payload(events),))
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

    def _decide(self, pending: Pending, frame: _Frame) -> Decision | None:
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
    ) -> RocketMQError | None:
        """See to it that the frame can be written with this in it; why that cannot be.

        Later there would be a state to undo.
        """
        needed = self._frame_bytes + decision.encode()
        if needed > FRAME_BYTES_MAX:
            return RequestError(f"This takes {needed} bytes of the log at once: ask for less.")
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
        for placed, payload in zip(decision.placed, decision.payloads, strict=True):
            position = self.log.stage_payload(MESSAGES, payload)
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
