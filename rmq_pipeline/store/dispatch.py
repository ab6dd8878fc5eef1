"""The dispatch thread: moves synced frames of the commit log into DuckDB, many at a time."""

import threading
from collections.abc import Callable, Iterator
from typing import Final

from rmq_pipeline.errors import StorageError, StoreFullError
from rmq_pipeline.limits import MIB
from rmq_pipeline.store.commit_log import CommitLog, FaultPoint
from rmq_pipeline.store.database import Database
from rmq_pipeline.store.stretch import Stretch, Stretches

#: A transaction takes frames up to this many bytes or rows, and at least one. The rows are one of
#: DuckDB's row groups, which goes straight into its file; fewer go to its write-ahead log first,
#: in ten times the bytes, and are compressed by a checkpoint later.
TRANSACTION_BYTES: Final = 192 * MIB
TRANSACTION_ROWS: Final = 122_880
#: With so much to do dispatch does not wait for more.
PRESSING_BYTES: Final = 128 * MIB
#: How long a synced frame waits for company when nobody waits for it.
DELAY_S: Final = 0.2


class Dispatcher:
    """Keeps a database some 0.3 s behind its log at most. Begins with what the log has already.

    Args:
        on_failure: called once, from the dispatch thread, when a transaction fails: the thread has
            ended and the broker must too. Not called when the log has failed or was closed: its
            owner knows, and makes another dispatcher with another log.
        on_full: called, from the dispatch thread, when the disk is full; True when it has made
            room, and the transaction is tried again.
        fault: called before and after each transaction with the name of the step.
    """

    def __init__(
        self,
        log: CommitLog,
        database: Database,
        *,
        on_failure: Callable[[Exception], None],
        on_full: Callable[[StoreFullError], bool] = lambda _: False,
        fault: FaultPoint | None = None,
    ) -> None:
        self._log = log
        self._stretches = Stretches(log)
        self._database = database
        self._on_failure = on_failure
        self._on_full = on_full
        self._fault = fault
        self._lock = threading.Lock()
        #: Wakes the dispatch thread, and those who wait for it.
        self._work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        #: The largest positions told of, and waited for.
        self._noticed = 0
        self._wanted = 0
        self._sleeps = False
        self._over = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="dispatch", daemon=True)

    @property
    def behind_bytes(self) -> int:
        """How much of the synced log is not in the database."""
        return max(0, self._log.synced - self._database.dispatched)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the transaction it is in; the log keeps the rest."""
        self._end(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def notify(self, position: int) -> None:
        """The log has frames up to a position. For the writer thread, after every frame."""
        self._noticed = position
        # Waking a thread for every frame would take the interpreter from the writer: in between
        # dispatch looks for itself. It says that it sleeps before it looks whether there is work.
        if self._sleeps or self._is_pressing():
            with self._lock:
                self._work.notify()

    def wait_for(self, position: int, timeout_s: float | None = None) -> bool:
        """Wait until everything before a synced position is in the database; False: time ran out.

        Raises:
            StorageError: dispatch has failed or was stopped.
        """
        if self._database.dispatched >= position:
            return True
        with self._lock:
            self._wanted = max(self._wanted, position)
            self._work.notify()
            self._done.wait_for(
                lambda: self._over or self._database.dispatched >= position, timeout_s
            )
        if self._database.dispatched >= position:
            return True
        if self._over:
            raise StorageError("Dispatch has ended.") from self._failure
        return False

    def _run(self) -> None:
        try:
            while self._rest():
                self._move()
        except _LogGoneError as error:
            self._end(error)
        except Exception as error:  # noqa: BLE001 whatever it was, the broker must hear of it
            self._end(error)
            self._on_failure(error)

    def _end(self, failure: Exception | None) -> None:
        with self._lock:
            self._over = True
            self._failure = self._failure or failure
            self._work.notify()
            self._done.notify_all()

    def _rest(self) -> bool:
        """Wait for work, and then for more of it; False at the end."""
        with self._lock:
            while not self._over:
                self._sleeps = True
                if self.behind_bytes:
                    break
                # With flush = async a frame is told of before it is on disk: look again.
                self._sleeps = self._noticed <= self._log.synced
                self._work.wait(None if self._sleeps else DELAY_S)
            self._sleeps = False
            self._work.wait_for(lambda: self._over or self._is_pressing(), DELAY_S)
            return not self._over

    def _is_pressing(self) -> bool:
        reached, synced = self._database.dispatched, self._log.synced
        return min(self._wanted, synced) > reached or synced - reached >= PRESSING_BYTES

    def _move(self) -> None:
        start, stop = self._database.dispatched, self._log.synced
        stretches = self._stretches.between(start, stop)
        while not self._over and (some := self._take(stretches)):
            self._dispatch(some)
            with self._lock:
                self._done.notify_all()
            reached = self._database.dispatched
            if stop - reached < reached - start and not self._is_pressing():
                break  # what remains is no row group yet
            start = reached

    def _take(self, stretches: Iterator[Stretch]) -> list[Stretch]:
        """The frames of one transaction."""
        taken: list[Stretch] = []
        start, count = self._database.dispatched, 0
        try:
            for stretch in stretches:
                taken.append(stretch)
                count += sum(rows.batch.num_rows for rows in stretch.rows)
                if count >= TRANSACTION_ROWS or stretch.end - start >= TRANSACTION_BYTES:
                    break
        except StorageError as error:
            raise _LogGoneError from error
        return taken

    def _dispatch(self, some: list[Stretch]) -> None:
        self._step("before_dispatch")
        while True:
            try:
                self._database.dispatch(some)
            except StoreFullError as error:
                if self._over:  # the log keeps them for the next start
                    return
                if not self._on_full(error):
                    raise
            else:
                self._step("dispatched")
                return

    def _step(self, name: str) -> None:
        if self._fault:
            self._fault(name)


class _LogGoneError(Exception):
    """The log takes and gives nothing more."""
