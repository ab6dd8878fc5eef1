"""A standby: it follows the log of the broker that leads, and leads once that one has gone.

A thread reads new frames from the store. The writer's turn writes them to the files and applies
them to the state, as recovery does, so reads see whole frames. Dispatch works as on every broker.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.broker.work import shared_files
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.recovery import replay
from rmq_pipeline.broker.work.repair import text_of
from rmq_pipeline.broker.work.replicating import Followed
from rmq_pipeline.clock import Deadline
from rmq_pipeline.errors import (
    ConflictError,
    HomeFormatError,
    LogFencedError,
    LogHeldError,
    LogStoreError,
    OperatorError,
    RequestError,
    RocketMQError,
)
from rmq_pipeline.limits import MIB
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.log.catching_up import DivergedLogError
from rmq_pipeline.store.log.shared_log import FollowingLog, StoredFrame
from rmq_pipeline.store.segment_reader import Segments

log = logging.getLogger(__name__)

#: Looks at the lease within its time, and longest pause between two.
_LOOKS: Final = 8
_LOOK_S: Final = 0.5
#: Pause between two looks for log that the leader has sealed.
_TRIM_S: Final = 30.0
#: Bytes of frames that are applied in one turn of the writer.
_TURN_BYTES: Final = 32 * MIB
#: A standby that has claimed the log and does not work within this time leaves it to another one.
_BEGIN_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Follow(Request):
    """Request that appends frames of the store to the log, and applies them to the state."""

    log: FollowingLog
    frames: Sequence[StoredFrame]
    segments: Segments

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store nothing of this broker's own."""
        self.log.check_open()
        return Decision(unlogged=[self._apply])

    def _apply(self, state: State) -> None:
        start = self.log.end
        self.log.append(self.frames)
        replay(state, self.log, start=start)
        if state.changed(Kind.SEGMENT, 0) >= start:
            self.segments.outdate()
        self.log.publish()


class Follower:
    """Thread of a standby."""

    def __init__(self, engine: Engine, *, on_leading: Callable[[], None]) -> None:
        """Start to follow.

        Args:
            on_leading: called once, in the thread, when this broker leads.
        """
        self._engine = engine
        self._on_leading = on_leading
        self._takes_over = engine.settings.failover == "auto"
        self._pause_s = engine.settings.log_poll_s()
        self._look_s = min(engine.settings.log_lease_ms / 1000 / _LOOKS, _LOOK_S)
        self._wakes = threading.Condition()
        self._closing = False
        #: The promotion that was asked for; None: none was.
        self._asked: _Promotion | None = None
        #: Why this home cannot become a copy of the store; None: nothing says so.
        self._diverged: DivergedLogError | None = None
        #: The access rules of the home have changed, and are not in force yet.
        self._has_new_rules = False
        # The archive may not answer, and this broker must be able to lead meanwhile.
        self._threads = [
            threading.Thread(target=self._run, name="rmq-standby", daemon=True),
            threading.Thread(target=self._trim, name="rmq-standby-trim", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def promote(self, *, force: bool, timeout_s: float) -> None:
        """Begin to lead, and return once this broker does.

        Args:
            force: begin also while another broker leads, which ends.

        Raises:
            LogHeldError: another broker leads.
            LogStoreError: the store does not answer in time.
            ConflictError: another promotion is under way, or the broker closes.
        """
        asked = _Promotion(force)
        with self._wakes:
            if self._asked is not None or self._closing:
                raise ConflictError("This standby is being promoted, or closes.")
            self._asked = asked
            self._wakes.notify_all()
        if not asked.done.wait(timeout_s):
            with self._wakes:  # an old promotion must not end a leader later
                if self._asked is asked:
                    self._asked = None
            raise LogStoreError("The standby did not begin to lead in time.")
        if asked.error is not None:
            raise asked.error

    def stop(self) -> None:
        """End the thread."""
        with self._wakes:
            self._closing = True
            self._wakes.notify_all()
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join()

    def _run(self) -> None:
        try:
            self._follow_and_lead()
        finally:
            self._answer(ConflictError("The standby closes."))

    def _trim(self) -> None:
        while True:
            with self._wakes:
                self._wakes.wait_for(lambda: self._closing, _TRIM_S)
            if self._closing or self._engine.followed is None:
                return
            try:
                shared_files.follow(self._engine)
            except (RocketMQError, OSError) as error:
                log.warning("The standby keeps log that is sealed: %s", error)
            except Exception:
                log.exception("The standby keeps log that is sealed.")

    def _follow_and_lead(self) -> None:
        look = Deadline(0.0)
        while not self._closing:
            followed = self._engine.followed
            if followed is None:
                self._begin()
                return
            try:
                if look.is_over or self._asked is not None:
                    look = Deadline(self._look_s)
                    self._look(followed)
                    continue
                more = self._follow(followed)
                if self._engine.writer.failure is None:
                    self._has_failed(followed, None)
            except RocketMQError as error:
                self._diverged = error if isinstance(error, DivergedLogError) else self._diverged
                self._has_failed(followed, error.message)
                more = False
            except Exception as error:  # noqa: BLE001 without this thread it would never follow
                self._has_failed(followed, repr(error))
                more = False
            if not more:
                self._rest()

    def _rest(self) -> None:
        asked = self._asked
        with self._wakes:
            self._wakes.wait_for(lambda: self._closing or self._asked is not asked, self._pause_s)

    def _has_failed(self, followed: Followed, why: str | None) -> None:
        if why is not None and followed.failing != why:
            log.warning("The standby does not follow, and tries again: %s", why)
        followed.failing = why

    def _look(self, followed: Followed) -> None:
        """Look at the lease and the access rules, and begin to lead if that is due."""
        asked, runs = self._asked, followed.look()
        self._has_new_rules = followed.take_access() or self._has_new_rules
        if self._has_new_rules:
            self._engine.access.reload()
            self._has_new_rules = False
        force = asked is not None and asked.force
        broken = self._diverged or self._engine.writer.failure
        if asked is None and (runs or not self._takes_over or broken is not None):
            return
        if broken is not None:
            self._answer(OperatorError(f"This standby does not follow the log: {text_of(broken)}"))
            return
        if runs and not force:
            self._answer(LogHeldError(f"The log is led by {followed.leader}."))
            return
        try:
            self._engine.lead(force=force)
        except LogHeldError as error:  # another standby was faster
            log.info("%s", error.message)
            self._answer(error)

    def _follow(self, followed: Followed) -> bool:
        """Take over the next frames; return False if there are none."""
        commit_log, broken = self._engine.log, self._engine.writer.failure
        if broken is not None:  # housekeeping rebuilds it
            self._has_failed(followed, text_of(broken))
            return False
        assert isinstance(commit_log, FollowingLog), "the log of a standby"
        frames = followed.missing(commit_log.end, most_bytes=_TURN_BYTES)
        self._diverged = None
        if not frames:
            return False
        self._engine.writer.submit(Follow(commit_log, frames, self._engine.segments))
        self._engine.dispatcher.notify(commit_log.synced)
        return True

    def _begin(self) -> None:
        """Begin to work as the leader; leave the log to another broker if that does not succeed."""
        over, error = Deadline(_BEGIN_S), None
        while not self._closing:
            broken = self._engine.writer.failure
            error = broken if isinstance(broken, RocketMQError) else None
            try:
                if broken is None:
                    self._engine.begin()
                    self._on_leading()
                    self._answer(None)
                    return
            except RocketMQError as failed:  # the database or the disk may be away for a moment
                error = failed
            except Exception as failed:
                log.exception("The standby could not begin to lead.")
                error = OperatorError(repr(failed))
            if isinstance(error, LogFencedError):  # the process has been told
                break
            if over.is_over or isinstance(error, HomeFormatError | RequestError):
                self._give_up(error)
                break
            self._rest()
        self._answer(error or ConflictError("The standby closes."))

    def _give_up(self, error: RocketMQError | None) -> None:
        why = error.message if error is not None else "it does not work"
        log.error("This standby has claimed the log, and leaves it to another broker: %s", why)
        self._engine.leave_log()
        self._engine.repair.on_unrepairable(why)

    def _answer(self, error: RocketMQError | None) -> None:
        with self._wakes:
            asked, self._asked = self._asked, None
        if asked is not None:
            asked.error = error
            asked.done.set()


class _Promotion:
    """A request to lead, and its outcome."""

    def __init__(self, force: bool) -> None:
        self.force = force
        self.error: RocketMQError | None = None
        self.done = threading.Event()
