"""The writer, the only place that changes the state: decide, apply, commit, answer."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from rmq_pipeline.broker.decide.request import CheckFence, Decision, Request
from rmq_pipeline.broker.state import event_rows
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.broker.work.repair import refusal, text_of
from rmq_pipeline.broker.work.turns import Turns
from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import (
    LogFencedError,
    MessageBodyTooLargeError,
    RocketMQError,
    StandbyError,
    StorageError,
    StoreFullError,
)
from rmq_pipeline.store.log.commit_log import CommitLog
from rmq_pipeline.store.log.frame_builder import FrameBuilder

__all__ = ["EVENTS", "MESSAGES", "Decision", "Done", "Request", "Writer"]

log = logging.getLogger(__name__)

MESSAGES, EVENTS, KEYED_STATE = 1, 2, 3
#: Most requests of a frame, and its size: all answers of a frame wait for its sync.
FRAME_REQUESTS = 1024
FRAME_BYTES = 16 * 1024 * 1024
#: Time after a full disk in which sends are refused without another try.
FULL_PAUSE_MS = 1000


class Pending:
    """Request whose caller waits for ``done``."""

    __slots__ = ("answer", "done", "error", "first", "request")

    def __init__(self, request: Request, *, first: Request | None = None) -> None:
        self.request = request
        #: Decided just before, in the same frame; its refusal refuses the request.
        self.first = first
        self.answer: Any = None
        self.error: BaseException | None = None
        # A bare lock is the cheapest way to pass one answer to one waiting thread.
        self.done = threading.Lock()
        self.done.acquire()

    def is_bulk(self) -> bool:
        """Return True if deciding is slow enough that it should overlap a write."""
        return self.request.is_bulk() or (self.first is not None and self.first.is_bulk())

    def finish(self) -> None:
        """Release the answer or error to the caller."""
        self.done.release()


#: Called with the answer or error in the thread that wrote the frame; it must not wait.
Done = Callable[[Any, BaseException | None], None]


class Posted(Pending):
    """Request without a waiting caller: a function gets its answer."""

    __slots__ = ("tell",)

    def __init__(self, request: Request, tell: Done) -> None:
        self.request = request
        self.first = None
        self.answer: Any = None
        self.error: BaseException | None = None
        self.tell = tell

    @override
    def finish(self) -> None:
        try:
            self.tell(self.answer, self.error)
        except Exception:
            log.exception("A caller could not be told its answer; the request is stored.")


def small_first(together: list[Pending]) -> int:
    """Move small requests with a waiting caller to the front, before bulk; return how many.

    A waiting caller has no other request in the queue, so no order is lost. Posted requests keep
    their order.
    """
    if not is_bulk(together):
        return 0
    small = [p for p in together if not isinstance(p, Posted) and not p.is_bulk()]
    if small:
        first = set(map(id, small))
        together[:] = small + [p for p in together if id(p) not in first]
    return len(small)


def is_bulk(together: Iterable[Pending]) -> bool:
    """Return True if deciding one of them is slow enough that it should overlap a write."""
    for pending in together:  # noqa: SIM110 a loop costs each frame less than a generator
        if pending.is_bulk():
            return True
    return False


@dataclass(slots=True)
class _Frame:
    """Requests decided together, on the state of one log."""

    log: CommitLog
    number: int
    now_ms: int
    pending: list[Pending] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    staged: FrameBuilder | None = None
    #: Why the frame cannot be written: deciding has failed.
    error: Exception | None = None


class Writer:
    """Writer of the log, for requests from any thread.

    Each frame of requests is one write and one sync; then all its answers leave.

    One thread at a time decides, and one writes: the threads that hold the turns. The writer's own
    thread handles queued requests. A caller that finds the writer idle handles its frame itself.
    This saves two thread switches, which cost as much as a sync.

    A bulk frame is decided while the bulk frame before it is written: if more requests wait, a
    second thread writes what the first has decided. No caller gets an answer before both are on
    disk. Even an answer that stores nothing waits for the frame before.

    Small requests are decided as late as possible, so that many share a frame.
    """

    def __init__(
        self,
        commit_log: CommitLog,
        state: State,
        *,
        clock: Clock,
        committed: Callable[[Collection[Decision]], None],
        rebuild: Callable[[], tuple[CommitLog, State]],
        wrote: Callable[[float, int], None] = lambda _seconds, _size: None,
    ) -> None:
        """Prepare the writer; ``start`` lets it take requests.

        Args:
            committed: called with the decisions of a stored frame, after its answers.
            rebuild: rebuilds log and state from disk. If it raises, all requests are refused until
                a call of ``rebuild`` succeeds.
            wrote: called with the seconds that a write took, and its bytes, in the frame's turn.
        """
        self.log = commit_log
        self.state = state
        self._clock = clock
        self._committed = committed
        self._rebuild = rebuild
        self._wrote = wrote
        self._turns = Turns()
        self._queue: queue.SimpleQueue[list[Pending] | None] = queue.SimpleQueue()
        self._full_until_ms = 0
        #: Most bytes needed by the decisions of the frame being built.
        self._frame_bytes = 0
        #: Why the state cannot be used; None: it can.
        self._fatal: BaseException | None = None
        #: True if a rebuild was requested and has not started.
        self._rebuild_asked = False
        self._closed = False
        #: Held to add to the queue: requests added before the end marker get an answer.
        self._entering = threading.Lock()
        #: Decided bulk frames that the second thread writes.
        self._decided: queue.SimpleQueue[_Frame | None] = queue.SimpleQueue()
        self._threads = (
            threading.Thread(target=self._run, name="rmq-writer", daemon=True),
            threading.Thread(target=self._write_bulk, name="rmq-bulk-writer", daemon=True),
        )

    def start(self) -> None:
        """Start the threads; the writer takes requests from now on."""
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request, *, first: Request | None = None) -> Any:
        """Return the answer to a request, once its rows are on disk.

        Args:
            first: a request that is decided just before, in the same frame. If it is refused, so is
                ``request``, with the same error. If ``request`` is refused then, ``first`` is
                stored.
        """
        pending = Pending(request, first=first)
        if not self._write_here(pending):
            self._put([pending])
        pending.done.acquire()
        if pending.error is not None:
            raise pending.error
        return pending.answer

    def post(self, request: Request, done: Done) -> None:
        """Queue a request; ``done`` gets the answer that ``submit`` would return.

        Returns at once and writes nothing itself: for threads that must not be held up.
        """
        self._put([Posted(request, done)])

    def post_together(self, requests: Iterable[tuple[Request, Done]]) -> None:
        """Queue several requests, which share a frame as far as they fit."""
        self._put([Posted(request, done) for request, done in requests])

    def submit_together(self, requests: Sequence[Request]) -> list[Any]:
        """Return the answers to requests that share one frame.

        A refused request has its error in place of the answer.
        """
        together = [Pending(request) for request in requests]
        # A copy: the writer appends requests of other callers to its list.
        self._put(list(together))
        for pending in together:
            pending.done.acquire()
        return [p.answer if p.error is None else p.error for p in together]

    @property
    def failure(self) -> BaseException | None:
        """Why all requests are refused until a ``rebuild`` succeeds; None: they are not."""
        return self._fatal

    def rebuild(self, why: BaseException) -> None:
        """Drop the state and rebuild it from disk; return after the attempt.

        Requests that wait meanwhile get an error. The writer's own threads must not call this.
        """
        pending = Pending(CheckFence())
        with self._entering:
            if self._closed:
                return
            self._fatal = self._fatal or why
            self._rebuild_asked = True
            self._queue.put([pending])
        pending.done.acquire()

    def _write_here(self, pending: Pending) -> bool:
        """Write a frame in the caller's thread, if the writer is idle.

        Not in the main thread: there a signal handler (Ctrl-C) may raise at any line.
        """
        if threading.get_ident() == threading.main_thread().ident or not self._queue.empty():
            return False
        if self.log.gather_s:  # the writer's thread waits for further requests
            return False
        number = self._turns.try_take(bulk=pending.is_bulk())
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
            raise StorageError("The broker is closed.", remedy="Open it again.")
        self._check_usable()

    def _check_usable(self) -> None:
        if self._fatal is not None:
            raise refusal(self._fatal)

    def close(self) -> None:
        """Answer the queued requests, then end the threads."""
        with self._entering:
            self._closed = True
            self._queue.put(None)
        deciding, writing = self._threads
        deciding.join()
        self._turns.close()  # a caller may be writing a frame
        self._decided.put(None)
        writing.join()

    def _run(self) -> None:
        # Bulk lets small requests pass once only; otherwise it might wait forever.
        closing = passed = False
        while not closing:
            together = self._queue.get()
            closing = together is None
            gathered_at = time.monotonic() + self.log.gather_s
            while together:
                bulk = is_bulk(together)
                number = self._turns.take(bulk=bulk)
                closing = closing or self._gather(together, until=gathered_at)
                closing = closing or self._drain(together)
                small = 0 if passed else small_first(together)
                passed = small > 0
                frame = self._frame_of(together[:small] or together, number)
                together = together[len(frame.pending) :]
                more = bool(together) or not self._queue.empty()
                self._write_or_leave(frame, leave=bulk and more)
                del frame  # Waiting for the next frame must not keep this one's messages in memory.

    def _write_or_leave(self, frame: _Frame, *, leave: bool = False) -> None:
        """Write a decided frame, or leave it to the bulk writer's thread.

        That thread goes from frame to frame without a wakeup, and keeps the disk busy. It gets
        frames with an unwritten frame before them, and bulk frames if more requests wait.
        """
        leave = leave or self._turns.has_before(frame.number)
        if leave:
            self._decided.put(frame)  # before the next frame is decided: it takes them in order
        self._turns.decided()
        if not leave:
            self._finish(frame)

    def _write_bulk(self) -> None:
        while (frame := self._decided.get()) is not None:
            self._finish(frame)
            del frame  # As above: a frame has up to 1 GiB.

    def _gather(self, together: list[Pending], *, until: float) -> bool:
        """Wait for further requests; return True if the end marker was among them."""
        while len(together) < FRAME_REQUESTS and (left_s := until - time.monotonic()) > 0:
            try:
                item = self._queue.get(timeout=left_s)
            except queue.Empty:
                return False
            if item is None:
                return True
            together.extend(item)
        return False

    def _drain(self, together: list[Pending]) -> bool:
        """Append the queued requests; return True if the end marker was among them."""
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
        """Decide the first of these requests, and return their frame."""
        now_ms = max(self._clock.now_ms(), self.state.last_at_ms)
        self.state.ahead_ms = max(0, self._clock.ahead_ms())
        self.state.position = self.log.building.start
        frame = _Frame(self.log, number, now_ms)
        try:
            self._decide_some(frame, together)
        except Exception as error:  # noqa: BLE001 after any error the state is unusable
            frame.error = error
        return frame

    def _finish(self, frame: _Frame) -> None:
        """Write a frame in its turn, and answer its requests."""
        self._turns.wait_to_write(frame.number)
        written = self._write(frame)
        self._turns.written()
        for pending in frame.pending:
            pending.finish()
        if written and frame.decisions:
            try:
                self._committed(frame.decisions)
            except Exception:
                log.exception("A listener could not be told of a stored frame.")

    def _decide_some(self, frame: _Frame, together: list[Pending]) -> None:
        self._frame_bytes = 0
        events: list[EventRows] = []
        for pending in together:
            frame.pending.append(pending)
            self._check_usable()
            for decision in self._decide(pending, frame):
                frame.decisions.append(decision)
                events += decision.events
            if self._frame_bytes > FRAME_BYTES:  # with its events, which are staged at the end
                break
        if events:
            self.log.stage_payload(EVENTS, (event_rows.to_payload(events),))
        frame.staged = self.log.take()

    def _write(self, frame: _Frame) -> bool:
        """Write a frame in its turn; return False if that failed."""
        try:
            if frame.error is not None:
                raise frame.error
            if frame.log is not self.log:
                raise StorageError("A frame that was decided before this one was not committed.")
            self._check_usable()
            assert frame.staged is not None
            began = time.perf_counter()
            frame.log.write(frame.staged)
            if size := frame.staged.length:
                self._wrote(time.perf_counter() - began, size)
        except Exception as error:  # noqa: BLE001 after any error the frame is not on disk
            self._fail(frame, error)
            return False
        return True

    def _decide(self, pending: Pending, frame: _Frame) -> list[Decision]:
        """Decide and apply a request after the one that goes first; return what they store."""
        decisions = []
        for request in (pending.first, pending.request):
            if request is None:
                continue
            decision = self._decide_one(request, pending=pending, frame=frame)
            if decision is None:
                break
            if decision.stores():
                decisions.append(decision)
        return decisions

    def _decide_one(self, request: Request, *, pending: Pending, frame: _Frame) -> Decision | None:
        """Decide and apply a request; note its answer or error for the caller."""
        now_ms = frame.now_ms
        try:
            if now_ms < self._full_until_ms and not request.uses_reserve:
                raise StoreFullError("The disk is full.")
            decision = request.decide(self.state, now_ms)
            if decision.refills_reserve:
                decision.answer = self.log.refill_reserve()
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
        """Ensure that the frame with this decision can be written; return the error if it cannot.

        Checked before the decision is applied, because the state has no undo.
        """
        needed = self._frame_bytes + decision.encode()
        if needed > self.log.frame_bytes_max:
            return MessageBodyTooLargeError(
                f"The request takes {needed} bytes of one frame; the limit is"
                f" {self.log.frame_bytes_max}.",
                remedy="Settle, send or receive fewer messages at a time.",
            )
        if self.log.needs_file(needed) and not self._turns.wait_to_write(frame.number):
            raise StorageError("A frame that was decided before this one was not committed.")
        try:
            self.log.make_room(frame_bytes=needed, use_reserve=request.uses_reserve)
        except StandbyError as error:
            return error
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
        for change in decision.unlogged:
            change(self.state)
        for batch in decision.keyed_state:
            self.log.stage(KEYED_STATE, batch)
            self.state.keep(batch)

    def _fail(self, frame: _Frame, error: Exception) -> None:
        """Answer all requests of a frame with an error, and rebuild the state from disk.

        Called in the frame's turn to write: all earlier frames are written, and no later one is.
        """
        if isinstance(error, StoreFullError):
            self._full_until_ms = frame.now_ms + FULL_PAUSE_MS
        answer = error if isinstance(error, RocketMQError) else StorageError(str(error))
        for pending in frame.pending:
            # Refusals too: they were decided on a state that is not on disk.
            pending.answer, pending.error = None, answer
        if isinstance(error, LogFencedError):
            self._fatal = error  # another broker leads: this one never rebuilds and goes on
        if isinstance(self._fatal, LogFencedError):
            return
        if frame.log is not self.log or (self._fatal is not None and not self._rebuild_asked):
            return
        self._rebuild_asked = False
        if self._fatal is None and not isinstance(error, StoreFullError):
            text = "A frame was not committed; the state is rebuilt from disk."
            log.error(text, exc_info=error)
        self._turns.stop()
        try:
            self.log, self.state = self._rebuild()
            self._fatal = None
        except Exception as fatal:  # noqa: BLE001 after any error there is no state
            # Its traceback would keep the files of this attempt open.
            kind = LogFencedError if isinstance(fatal, LogFencedError) else StorageError
            self._fatal = kind(text_of(fatal))
        finally:
            self._turns.go_on()
