"""The parts of an open broker, put together: home, log, database, dispatch, state, writer."""

import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rmq_pipeline import limits, schema
from rmq_pipeline.access import Access
from rmq_pipeline.broker.admin import Found
from rmq_pipeline.broker.archive_root import archive_of
from rmq_pipeline.broker.arrivals import Arrivals
from rmq_pipeline.broker.event_rows import EventRows
from rmq_pipeline.broker.failures.unburied import Unburied
from rmq_pipeline.broker.home import Home
from rmq_pipeline.broker.members.membership import Members
from rmq_pipeline.broker.receiving.sieve import Verdicts
from rmq_pipeline.broker.recovery import recover
from rmq_pipeline.broker.room import RefillReserve, give_up_reserve, part_of
from rmq_pipeline.broker.sending.bulk_gate import BulkGate
from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.stored.queue_index import PAGE_ROWS
from rmq_pipeline.broker.stored.trimming import TrimIndex
from rmq_pipeline.broker.transactions.offers import Offers
from rmq_pipeline.broker.writer import EVENTS, MESSAGES, Decision, Done, Request, Writer
from rmq_pipeline.clock import Clock
from rmq_pipeline.errors import DispatchBehindError, RocketMQError, StorageError, StoreFullError
from rmq_pipeline.message import Int64s, MessageIds
from rmq_pipeline.settings import Settings
from rmq_pipeline.store.commit_log import CommitLog, FaultPoint
from rmq_pipeline.store.database import Database
from rmq_pipeline.store.dispatch import Dispatcher
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.segment_reader import Segments

log = logging.getLogger(__name__)

#: How long a reader waits for dispatch; it is 0.3 s behind at most unless the disk is stuck.
_DISPATCH_WAIT_S = 60.0
#: How long dispatch waits before it tries a full disk again.
_FULL_WAIT_S = 2.0

SCHEMAS = {MESSAGES: schema.MESSAGE, EVENTS: schema.EVENT}
#: Events after which something may be visible to a waiting receive.
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
    }
)


class Engine:
    """An open store and the thread that writes it. Verbs are functions over it."""

    def __init__(
        self,
        home: Home,
        clock: Clock,
        *,
        settings: Settings,
        flush: Literal["sync", "async"],
        fault: FaultPoint | None,
    ) -> None:
        self.home = home
        self.clock = clock
        self.settings = settings
        self.flush = flush
        self._fault = fault
        self.access = Access.open(home.path)
        self.ids = MessageIds()
        self.bulk_gate = BulkGate()
        self.arrivals = Arrivals(clock)
        self.members = Members(clock, timeout_ms=settings.member_timeout_ms)
        #: What doors add to the broker's status, by name.
        self.reports: dict[str, Callable[[], Any]] = {}
        self.offers = Offers()
        self.unburied = Unburied()
        self.segments = Segments(archive_of(home, settings.archive_root))
        #: What was last found to be due in the archive (stored/tending.py).
        self.outlook: Any = None
        #: Expiry found something under way in front of all that is old: it looks again then.
        self.held_until_ms = 0
        self.verdicts = Verdicts()
        self.database = self._open_database()
        try:
            commit_log = self._open_log()
            state = recover(self.database.load_state(), commit_log)
        except BaseException:
            self.database.close()
            raise
        self.writer = Writer(
            commit_log, state, clock=clock, committed=self._committed, rebuild=self._rebuild
        )
        self.dispatcher = self._dispatcher(commit_log)
        self.failure: BaseException | None = None
        self._closing = threading.Event()

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        clock: Clock,
        settings: Settings,
        flush: Literal["sync", "async"],
        fault: FaultPoint | None = None,
    ) -> "Engine":
        """Lock the home, recover, begin to write.

        Args:
            fault: is told of each step of commit and dispatch; crash tests end the process in it.

        Raises:
            HomeLockedError, HomeFormatError, CorruptLogError, StorageError.
        """
        home = Home.open(path)
        try:
            engine = cls(home, clock, settings=settings, flush=flush, fault=fault)
            engine.writer.start()
            engine._start_dispatch(engine.log)
            engine.submit(Found(len(settings.delay_levels_ms)))
            threading.Thread(target=engine._keep_house, name="rmq-house", daemon=True).start()
        except BaseException:
            home.close()
            raise
        return engine

    def _open_database(self) -> Database:
        """The database; on a full disk parts of the reserve go to what opening writes."""
        while True:
            try:
                return Database.open(
                    self.home.database, memory_bytes=self.settings.duckdb_memory_bytes
                )
            except StoreFullError:
                give_up_reserve(self.home.log, self.settings.reserve_bytes)

    def _open_log(self) -> CommitLog:
        return CommitLog.open(
            self.home.log,
            schemas=SCHEMAS,
            file_bytes=self.settings.log_file_bytes,
            reserve_bytes=self.settings.reserve_bytes,
            flush=self.flush,
            dispatched_position=self.database.dispatched,
            fault=self._fault,
        )

    def _dispatcher(self, commit_log: CommitLog) -> Dispatcher:
        return Dispatcher(
            commit_log,
            self.database,
            on_failure=self._dispatch_failed,
            on_full=self._dispatch_full,
            fault=self._fault,
        )

    def _dispatch_failed(self, error: BaseException) -> None:
        log.error("Dispatch has failed; the broker takes nothing more.", exc_info=error)
        self.failure = error

    def _dispatch_full(self, error: StoreFullError) -> bool:
        """Give dispatch a part of the reserve; without one it waits until the disk has room."""
        log.warning("The disk is full for dispatch: %s", error)
        try:
            self.log.draw_reserve(part_of(self.settings.reserve_bytes))
        except (StoreFullError, StorageError):
            return not self._closing.wait(_FULL_WAIT_S)
        return True

    @property
    def log(self) -> CommitLog:
        """The open commit log; another one after a failed write."""
        return self.writer.log

    @property
    def state(self) -> State:
        """The state. Threads but the writer's may look up topics and groups in it, no more."""
        return self.writer.state

    def submit(self, request: Request) -> Any:
        """Have the writer decide and store a request; its answer."""
        if self.failure is not None:
            raise StorageError(f"Dispatch has failed: {self.failure}")
        return self.writer.submit(request)

    def post(self, request: Request, done: Done) -> None:
        """Have the writer decide and store a request; ``done`` is told its answer."""
        if self.failure is not None:
            raise StorageError(f"Dispatch has failed: {self.failure}")
        self.writer.post(request, done)

    def post_together(self, requests: Iterable[tuple[Request, Done]]) -> None:
        """The same for several requests at once."""
        if self.failure is not None:
            raise StorageError(f"Dispatch has failed: {self.failure}")
        self.writer.post_together(requests)

    def admit(self) -> None:
        """Refuse more messages while dispatch is far behind.

        Raises:
            DispatchBehindError: by more than the settings allow.
        """
        behind = self.dispatcher.behind_bytes
        if behind > self.settings.dispatch_behind_bytes:
            raise DispatchBehindError(f"Dispatch is {behind} bytes behind the commit log.")

    def dispatched(self) -> None:
        """Wait until dispatch has reached what was answered by now: SQL reads its own writes.

        Raises:
            DispatchBehindError: it takes too long.
        """
        if self.flush == "async":
            self._sync()
        if not self.dispatcher.wait_for(self.log.synced, _DISPATCH_WAIT_S):
            raise DispatchBehindError("Dispatch does not reach what was written.")

    def _sync(self) -> None:
        self.log.sync()
        self.dispatcher.notify(self.log.synced)

    def _keep_house(self) -> None:
        """Sync regularly in async mode; keep reserve and read-ahead as they should be."""
        while not self._closing.wait(limits.ASYNC_SYNC_MS / 1000):
            try:
                if self.flush == "async":
                    self._sync()
                rows = self.settings.index_cache_rows
                self.writer.submit(RefillReserve(self.writer))
                self.writer.submit(TrimIndex(rows // PAGE_ROWS, self.database.dispatched))
                self.members.let_go(self.writer.submit)
            except RocketMQError:  # the writer meets a failed disk at its next frame, and rebuilds
                if not self._closing.is_set():
                    log.exception("Housekeeping has failed; it is tried again.")

    def new_delivery(self) -> int:
        """A delivery number nobody can guess."""
        return secrets.randbits(62) + 1

    def new_deliveries(self, n: int) -> Int64s:
        """``n`` of them."""
        numbers = np.frombuffer(secrets.token_bytes(8 * n), dtype=np.int64)
        return (numbers & np.int64(2**62 - 1)) + np.int64(1)

    def _committed(self, decisions: Iterable[Decision]) -> None:
        """A frame is on disk: tell dispatch, and wake who waits."""
        self.dispatcher.notify(self.log.synced)
        rung: dict[int, set[int] | None] = {}
        for decision in decisions:
            for events in filter(self._rings, decision.events):
                groups = rung.setdefault(events.topic_id, set())
                if groups is not None:
                    groups.add(events.group_id)
                if events.kind == Kind.RESET:
                    self._tell_of_reset(events)
            rung.update((placed.topic_id, None) for placed in decision.placed)
        self.arrivals.ring_for(rung)

    def _tell_of_reset(self, events: EventRows) -> None:
        group, topic = (
            self.state.groups.get(events.group_id),
            self.state.topics.get(events.topic_id),
        )
        if group is not None and topic is not None and np.any(events.delivery >= 0):
            self.members.was_reset(group.name, topic.topic.name)

    def _rings(self, events: EventRows) -> bool:
        """Whether something may be visible after these; acks open the way only where order is."""
        if events.kind not in (Kind.ACK, Kind.ACK_AHEAD):
            return events.kind in _RINGS
        key = (events.group_id, events.topic_id, events.queue_id)
        consumption = self.state.consumptions.get(key)
        if consumption is None or not consumption.by_queue:
            return consumption is None or consumption.ordered
        # Most acks of a batch leave its queue blocked, and would wake whoever waits in vain.
        return consumption.was_eased()

    def _rebuild(self) -> tuple[CommitLog, State]:
        """Throw the state away and make it again from what is on disk."""
        self.dispatcher.stop()
        self.writer.log.close()
        self.verdicts.clear()
        commit_log = self._open_log()
        state = recover(self.database.load_state(), commit_log)
        self.dispatcher = self._dispatcher(commit_log)
        self._start_dispatch(commit_log)
        return commit_log, state

    def _start_dispatch(self, commit_log: CommitLog) -> None:
        self.dispatcher.start()
        self.dispatcher.notify(commit_log.synced)

    def close(self) -> None:
        """Answer what is asked, dispatch all of it, and let the home go."""
        self._closing.set()
        self.arrivals.close()
        self.writer.close()
        try:
            if self.failure is None:
                self.dispatched()
        finally:
            with ExitStack() as last:  # the home is let go whatever becomes of the others
                last.callback(self.home.close)
                last.callback(self.database.close)
                last.callback(self.log.close)
                last.callback(self.dispatcher.stop)
