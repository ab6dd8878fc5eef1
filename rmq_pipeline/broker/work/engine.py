"""The parts of an open broker: home, log, database, dispatch, state, writer."""

import json
import logging
import secrets
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rmq_pipeline import limits, schema
from rmq_pipeline.access import Access
from rmq_pipeline.archive.shared_history import SharedHistory
from rmq_pipeline.broker.decide.admin import Found
from rmq_pipeline.broker.decide.queue_index import TrimIndex
from rmq_pipeline.broker.decide.request import Decision, RefillReserve, Request
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.filter_cache import FilterResults
from rmq_pipeline.broker.state.queue_index import PAGE_ROWS
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.broker.work import shared_state
from rmq_pipeline.broker.work.bulk_gate import BulkGate
from rmq_pipeline.broker.work.check_offers import Offers
from rmq_pipeline.broker.work.dead_letter_failures import DeadLetterFailures
from rmq_pipeline.broker.work.home import (
    Home,
    archive_of,
    archive_of_log,
    give_up_reserve,
    note_open,
    part_of,
)
from rmq_pipeline.broker.work.membership import Filters, Members
from rmq_pipeline.broker.work.meter import Meter
from rmq_pipeline.broker.work.recovery import recover
from rmq_pipeline.broker.work.repair import Repair, forget_frames, refusal, text_of
from rmq_pipeline.broker.work.replicating import Followed, Replicated, shared_log
from rmq_pipeline.broker.work.timekeeping import ClockFile
from rmq_pipeline.broker.work.waiting import Wakeups
from rmq_pipeline.broker.work.writer import EVENTS, MESSAGES, Done, Writer
from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import (
    DispatchBehindError,
    LogFencedError,
    StandbyError,
    StorageError,
    StoreFullError,
)
from rmq_pipeline.message import Int64s, MessageIds
from rmq_pipeline.settings import Settings
from rmq_pipeline.store.connection import HeldError
from rmq_pipeline.store.database import Database
from rmq_pipeline.store.dispatch import Dispatcher, StuckError
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.log.commit_log import CommitLog, FaultPoint
from rmq_pipeline.store.segment_reader import Segments

log = logging.getLogger(__name__)

#: Longest wait of a reader for dispatch, which is 0.3 s behind at most unless the disk hangs.
_DISPATCH_WAIT_S = 60.0
#: Pause of dispatch before it retries on a full disk.
_FULL_WAIT_S = 2.0

SCHEMAS = {MESSAGES: schema.MESSAGE, EVENTS: schema.EVENT}
#: Events that may make messages visible to waiting receives.
_RINGS = frozenset(
    {
        Kind.RETRY,
        Kind.RELEASE,
        Kind.EXPIRE,
        Kind.DEAD_LETTER,
        Kind.RESET,
        Kind.INVISIBLE,
        Kind.LITE_SUBSCRIPTION,
        Kind.QUEUE_UNLOCKED,
        Kind.TOPIC_DELETED,
        Kind.GROUP_DELETED,
    }
)
_DELETIONS = frozenset({Kind.TOPIC_DELETED, Kind.GROUP_DELETED})


class Engine:
    """Open store, and the thread that writes it. The verbs are functions over it."""

    def __init__(
        self,
        home: Home,
        clock: Clock,
        *,
        settings: Settings,
        flush: Literal["sync", "async"],
        fault: FaultPoint | None,
        shared: Replicated | Followed | None = None,
    ) -> None:
        self.home = home
        self.clock = clock
        self.settings = settings
        self.flush = flush
        self._fault = fault
        #: Called once, in any thread, when another broker leads the log: this process must end.
        self.on_fenced: Callable[[str], None] = lambda _: None
        self.access = Access.open(home.path, utc_offsets_min=settings.grpc_utc_offsets_min)
        self._share(shared)
        self.ids = MessageIds()
        self.bulk_gate = BulkGate()
        self.wakeups = Wakeups(clock)
        self.members = Members(clock, timeout_ms=settings.member_timeout_ms)
        self.filters = Filters(
            clock, live_ms=settings.member_timeout_ms, policy=settings.mixed_filters
        )
        #: Reports that endpoints add to the broker's status, by name.
        self.reports: dict[str, Callable[[], Any]] = {}
        self.meter = Meter()
        self.offers = Offers()
        self.dead_letter_failures = DeadLetterFailures()
        #: Registered segments, and the history files of a log in a store; None: it is in the home.
        self.segments, self.shared_history = self._open_archive()
        #: Last upkeep status of the archive (archiving.py).
        self.archive_status: Any = None
        #: Time of the next expiry, after pending messages have held back all old segments.
        self.held_until_ms = 0
        self.filter_results = FilterResults()
        #: Where the log of an empty home begins, until the log is open; None: at 0.
        self._begins_at = shared_state.begin(home.path, self.shared_history, log=shared)
        self.database = self._open_database()
        commit_log, state = self._recover()
        self._clock_file = ClockFile(home.path)
        self._clock_file.lead(clock, last_at_ms=state.last_at_ms)
        clock.go_on_from(state.last_at_ms)
        self.writer = Writer(
            commit_log,
            state,
            clock=clock,
            committed=self._committed,
            rebuild=self._rebuild,
            wrote=self.meter.wrote,
        )
        self.dispatcher = self._dispatcher(commit_log)
        self.repair = Repair()
        self._add_reports()
        self._closing = threading.Event()

    def _add_reports(self) -> None:
        self.reports["store"] = lambda: self.repair.report(self.dispatcher.stuck)
        self.reports["log_store"] = self._report_log_store

    def _share(self, shared: Replicated | Followed | None) -> None:
        self._shared = shared
        leads = shared if isinstance(shared, Replicated) else None
        #: Replication of the log to its store; None: only the home has it, or another broker leads.
        self.replication = leads.replication if leads else None
        #: The broker that leads, whose standby this one is; None: this one leads.
        self.followed = shared if isinstance(shared, Followed) else None
        if leads:
            self.access.share = leads.share_access
            leads.replication.on_fenced = self._fenced

    def _recover(self) -> tuple[CommitLog, State]:
        try:
            commit_log = self._open_log()
            state = recover(self.database, commit_log)
        except BaseException:
            self.database.close()
            raise
        self._begins_at = None
        shared_state.has_begun(self.home.path)
        return commit_log, state

    def _open_archive(self) -> tuple[Segments, SharedHistory | None]:
        address, shared = self.settings.archive_root, self._shared
        if shared is None:
            root, claim = archive_of(self.home, address)
            return Segments(root, claim=claim), None
        root = archive_of_log(self.home, address, log_id=shared.log_id, claimed=shared.archive)

        def claim_for_log() -> None:
            if self.leads is None:  # its epoch would be that of a home of its own
                raise StandbyError
            if address is not None:
                self.leads.claim_archive(root, address)

        history = SharedHistory(root, self.home.path) if address is not None else None
        return Segments(root, claim=claim_for_log), history

    @property
    def keeps_all(self) -> bool:
        """Return True if nothing may be sealed: successors would not find the segments."""
        return self._shared is not None and self.shared_history is None

    @property
    def leads(self) -> Replicated | None:
        """The log in its store, which this broker leads; None: only this home has it."""
        return self._shared if isinstance(self._shared, Replicated) else None

    @property
    def epoch(self) -> int:
        """Epoch of this leader, for names of files; 0: only this home has the log."""
        return self.replication.store.epoch if self.replication is not None else 0

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        clock: Clock,
        settings: Settings,
        flush: Literal["sync", "async"],
        standby: bool = False,
        fault: FaultPoint | None = None,
    ) -> "Engine":
        """Lock the home, recover the state, and start the writer.

        Args:
            standby: follow the broker that leads the log, if another one does.
            fault: called with each step of commit and dispatch; crash tests end the process in it.

        Raises:
            HomeLockedError, HomeFormatError, CorruptLogError, StorageError.
        """
        home = Home.open(path)
        try:
            note_open(home, settings)
            shared = shared_log(home, settings, standby=standby)
        except BaseException:
            home.note_closed()
            home.close()
            raise
        try:
            engine = cls(home, clock, settings=settings, flush=flush, fault=fault, shared=shared)
            engine.writer.start()
            engine._start_dispatch(engine.log)
            if engine.followed is None:
                engine.begin()
            threading.Thread(target=engine._keep_house, name="rmq-house", daemon=True).start()
        except BaseException:
            if shared is not None:
                shared.close()
            home.note_closed()
            home.close()
            raise
        return engine

    def _open_database(self) -> Database:
        """Open the database; on a full disk, release parts of the reserve for its writes."""
        fetch = self.shared_history.fetch if self.shared_history is not None else None
        while True:
            try:
                return Database.open(
                    self.home.database,
                    memory_bytes=self.settings.duckdb_memory_bytes,
                    fetch=fetch,
                )
            except StoreFullError:
                give_up_reserve(self.home.log, self.settings.reserve_bytes)

    def _open_log(self) -> CommitLog:
        how: dict[str, Any] = {
            "schemas": SCHEMAS,
            "file_bytes": self.settings.log_file_bytes,
            "reserve_bytes": self.settings.reserve_bytes,
            "flush": self.flush,
            "dispatched_position": self.database.dispatched,
            "fault": self._fault,
        }
        if self._shared is None:
            return CommitLog.open(self.home.log, **how)
        return self._shared.open_log(self.home.log, begins_at=self._begins_at, **how)

    def begin(self) -> None:
        """Store the event of a start, from which time goes on."""
        self.clock.go_on_from(self.state.last_at_ms)
        self.submit(Found(len(self.settings.delay_levels_ms)))

    def lead(self, *, force: bool) -> None:
        """Let a standby begin to lead; housekeeping repairs what fails once it has claimed the log.

        Args:
            force: begin also while another broker leads, which ends.

        Raises:
            LogHeldError: another broker leads.
            LogStoreError: the store does not answer.
            ArchiveError: the log has an archive, and the setting archive_root names another one.
        """
        followed = self.followed
        assert followed is not None, "a standby"
        followed.check_archive(self.segments.root if self.shared_history is not None else None)
        leader = followed.leader
        shared = followed.lead(force=force)
        log.warning("this standby begins to lead the log; the last leader was %s", leader)
        self._share(shared)
        if (fenced := shared.replication.fenced) is not None:  # before anybody could be told
            self._fenced(fenced)
        self.access.reload()
        self.writer.rebuild(StandbyError("This standby begins to lead."))

    def leave_log(self) -> None:
        """End the lease, so that another broker can lead; this one answers nothing more."""
        if self.replication is not None:
            self.replication.close()

    def _fenced(self, error: LogFencedError) -> None:
        """Refuse everything from now on: another broker leads the log."""
        self.repair.failed(error)
        self.on_fenced(error.message)

    def _report_log_store(self) -> dict[str, Any] | None:
        shared = self.followed or self.replication
        return shared.report(self.log.end) if shared is not None else None

    def confirm(self) -> None:
        """Wait until all frames answered so far are on disk and, if the log has one, in its store.

        Only then may files go that these frames replace.

        Raises:
            StorageError: the disk failed, or the store does not answer.
            LogFencedError: another broker leads.
        """
        end = self.log.end
        self.log.sync()
        if self.replication is not None:
            self.replication.wait_for(end)

    def check_leads(self) -> None:
        """Check that no other broker leads the log; free without a store.

        Raises:
            LogFencedError: another broker leads.
            LogStoreError: the store does not answer, and the lease is over.
        """
        if self.replication is not None:
            self.replication.check()

    def _dispatcher(self, commit_log: CommitLog) -> Dispatcher:
        return Dispatcher(
            commit_log,
            self.database,
            on_failure=self._dispatch_failed,
            on_full=self._dispatch_full,
            fault=self._fault,
        )

    def _dispatch_failed(self, error: BaseException) -> None:
        if self._closing.is_set() and isinstance(error, StoreFullError):
            behind = self.dispatcher.behind_bytes
            log.warning("The disk is full: the next start dispatches the last %d bytes.", behind)
            return
        log.error("Dispatch has failed; the broker rebuilds its state from disk.", exc_info=error)
        # The error's frames hold cursors of the database, which must be reopened.
        forget_frames(error)
        self.database.broken = self.database.broken or text_of(error)
        self.repair.failed(StorageError(f"Dispatch has failed: {text_of(error)}"))

    def _dispatch_full(self, error: StoreFullError) -> bool:
        """Release a part of the reserve for dispatch, or else wait until the disk has space."""
        if self.database.broken is not None:  # it is reopened first
            return False
        log.warning("Dispatch cannot write, the disk is full: %s", error)
        try:
            self.log.draw_reserve(part_of(self.settings.reserve_bytes))
        except (StoreFullError, StorageError):
            if self._closing.is_set():
                return False
            # Closing ends the wait, and dispatch tries once more: there may be space by now.
            self._closing.wait(_FULL_WAIT_S)
        return True

    @property
    def log(self) -> CommitLog:
        """Open commit log; replaced after a failed write."""
        return self.writer.log

    @property
    def state(self) -> State:
        """State; threads but the writer's may read only its topics, groups and ``changed``."""
        return self.writer.state

    def submit(self, request: Request, *, first: Request | None = None) -> Any:
        """Let the writer decide and store a request; return its answer. See ``Writer.submit``."""
        if (why := self.repair.why) is not None:
            raise refusal(why)
        return self.writer.submit(request, first=first)

    def post(self, request: Request, done: Done) -> None:
        """Let the writer decide and store a request; ``done`` gets its answer."""
        if (why := self.repair.why) is not None:
            raise refusal(why)
        self.writer.post(request, done)

    def post_together(self, requests: Iterable[tuple[Request, Done]]) -> None:
        """Post several requests at once."""
        if (why := self.repair.why) is not None:
            raise refusal(why)
        self.writer.post_together(requests)

    def admit(self) -> None:
        """Refuse new messages while dispatch is far behind.

        Raises:
            DispatchBehindError: dispatch is further behind than the settings allow.
        """
        behind = self.dispatcher.behind_bytes
        if behind > self.settings.dispatch_behind_bytes:
            why = f" {stuck}" if (stuck := self.dispatcher.stuck) else ""
            raise DispatchBehindError(f"Dispatch is {behind} bytes behind the commit log.{why}")

    def dispatched(self, position: int | None = None) -> None:
        """Wait until DuckDB has the frame at a log position; None: all frames answered so far.

        Raises:
            StuckError: DuckDB refuses that frame or an earlier one. Later frames do not matter.
            DispatchBehindError: dispatch takes too long.
            LogFencedError: another broker leads the log: the state may be old.
        """
        self.check_leads()
        self._reach(position)

    def _reach(self, position: int | None = None) -> None:
        if self.flush == "async" and (position is None or position >= self.log.synced):
            self._sync()
        reached = self.log.synced if position is None else position + 1
        if not self.dispatcher.wait_for(reached, _DISPATCH_WAIT_S):
            raise DispatchBehindError("Dispatch has not reached the written frames in time.")

    def _sync(self) -> None:
        try:
            self.log.sync()
        except StorageError as error:  # perhaps no write follows that would notice it
            if not self._closing.is_set():
                self.repair.failed(error)
            raise
        self.dispatcher.notify(self.log.synced)

    def _keep_house(self) -> None:
        """Sync at intervals in async mode; maintain reserve, read-ahead, clock and members."""
        while not self._closing.is_set():
            self.repair.wakes.wait(limits.ASYNC_SYNC_MS / 1000)
            self.repair.wakes.clear()
            try:
                if self.replication is not None and self.replication.fenced is not None:
                    return
                if why := self._why_failed():
                    pause_s = self.repair.next_attempt_s()
                    if not self._closing.wait(pause_s) and self._why_failed() is not None:
                        self.writer.rebuild(why)
                    continue
                if self.replication is not None and not self.replication.lease_runs:
                    continue  # a refused check would make the writer rebuild everything
                if self.flush == "async":
                    self._sync()
                self._clock_file.keep(self.clock)
                rows = self.settings.index_cache_rows
                self.writer.submit(RefillReserve())
                self.writer.submit(TrimIndex(rows // PAGE_ROWS, self.database.dispatched))
                self.members.let_go(self.writer.submit)
            except Exception as error:  # without this thread nothing is ever rebuilt
                if not (self._closing.is_set() or isinstance(error, StandbyError | LogFencedError)):
                    log.exception("Housekeeping has failed; the broker tries again.")

    def _why_failed(self) -> BaseException | None:
        """Return why the store must be rebuilt; None: it works."""
        if (broken := self.database.broken) is not None:
            self.repair.failed(StorageError(broken))
        elif (fatal := self.writer.failure) is not None:
            if isinstance(fatal, StandbyError):  # the thread that promotes it rebuilds it
                return None
            self.repair.failed(fatal)
        return self.repair.why

    def new_delivery(self) -> int:
        """Return a random delivery number that clients cannot guess."""
        return secrets.randbits(62) + 1

    def new_deliveries(self, n: int) -> Int64s:
        """Return ``n`` random delivery numbers."""
        numbers = np.frombuffer(secrets.token_bytes(8 * n), dtype=np.int64)
        return (numbers & np.int64(2**62 - 1)) + np.int64(1)

    def _committed(self, decisions: Collection[Decision]) -> None:
        """Notify dispatch of a frame on disk, wake the calls that wait for it, and count it."""
        self.dispatcher.notify(self.log.synced)
        changes: dict[int, set[int] | None] = {}
        deleted: list[int] = []
        deletions = 0
        for decision in decisions:
            for events in filter(self._rings, decision.events):
                if events.kind in _DELETIONS:
                    deletions += 1
                    changes |= self._deleted(events)
                    if events.kind == Kind.TOPIC_DELETED:
                        deleted.append(events.topic_id)
                    continue
                groups = changes.setdefault(events.topic_id, set())
                if groups is not None:
                    groups.add(events.group_id)
                if events.kind == Kind.RESET:
                    self._tell_of_reset(events)
            for placed in decision.placed:
                changes[placed.topic_id] = None
        self.wakeups.send(changes)
        self.wakeups.forget(deleted)
        self.meter.committed(decisions)
        if deletions:
            self.meter.deleted(self.state, deletions)

    def _deleted(self, events: EventRows) -> dict[int, set[int] | None]:
        """Return the topics and groups to wake after a deletion: their waits are over."""
        if events.kind == Kind.TOPIC_DELETED:
            return {events.topic_id: None}
        self.members.was_deleted(json.loads(events.detail_of(0))["name"])
        # The group may wait at any topic; None, because a set would drop other groups to wake.
        return dict.fromkeys(self.state.topics)

    def _tell_of_reset(self, events: EventRows) -> None:
        group, topic = (
            self.state.groups.get(events.group_id),
            self.state.topics.get(events.topic_id),
        )
        if group is not None and topic is not None and np.any(events.delivery >= 0):
            self.members.was_reset(group.name, topic.topic.name)

    def _rings(self, events: EventRows) -> bool:
        """Return True if the events may make messages visible; acks do so only with order."""
        if events.kind not in (Kind.ACK, Kind.ACK_AHEAD):
            return events.kind in _RINGS
        key = (events.group_id, events.topic_id, events.queue_id)
        consumption = self.state.consumptions.get(key)
        return consumption is None or consumption.acks_wake()

    def _rebuild(self) -> tuple[CommitLog, State]:
        """Drop the state, and rebuild it from disk."""
        try:
            rebuilt = self._rebuilt()
        except Exception as error:
            self.repair.not_mended(error, is_unrepairable=isinstance(error, HeldError))
            raise
        self.repair.mended()
        return rebuilt

    def _rebuilt(self) -> tuple[CommitLog, State]:
        self.dispatcher.stop()
        with suppress(StorageError):  # what it cannot sync, the new log writes again
            self.writer.log.close()
        self.filter_results.clear()
        if self.database.broken is not None:
            self.database.let_go()
            self.database = self._open_database()
        # The next seal reloads the registrations and deletes unregistered files.
        self.segments.loaded = self.segments.tidy = False
        commit_log = self._open_log()
        try:
            state = recover(self.database, commit_log)
        except BaseException:
            with suppress(StorageError):
                commit_log.close()
            raise
        self.dispatcher = self._dispatcher(commit_log)
        self._start_dispatch(commit_log)
        return commit_log, state

    def _start_dispatch(self, commit_log: CommitLog) -> None:
        self.dispatcher.start()
        self.dispatcher.notify(commit_log.synced)

    def _dispatch_rest(self) -> None:
        """Dispatch all frames; what DuckDB refuses, or the full disk, the log keeps."""
        try:
            self._reach()
        except StuckError:
            pass
        except StorageError as error:
            if not isinstance(error.__cause__, StoreFullError):
                raise

    def close(self) -> None:
        """Answer all requests, dispatch all frames, and unlock the home."""
        self._closing.set()
        self.repair.wakes.set()
        self.wakeups.close()
        self.writer.close()
        try:
            if self.repair.why is None:
                self._dispatch_rest()
        finally:
            with ExitStack() as last:  # the home is unlocked even if another part fails to close
                last.callback(self.home.close)
                with ExitStack() as files:
                    if self._shared is not None:
                        files.callback(self._shared.close)
                    files.callback(self.database.close)
                    files.callback(self.log.close)
                    files.callback(self.dispatcher.stop)
                self._clock_file.keep(self.clock, now=True)
                self.home.note_closed()
