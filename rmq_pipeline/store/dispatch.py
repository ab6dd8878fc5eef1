"""The dispatch thread: applies synced frames of the commit log to DuckDB in batches."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

from rmq_pipeline.errors import CorruptLogError, RocketMQError, StorageError, StoreFullError
from rmq_pipeline.limits import MIB
from rmq_pipeline.store.connection import is_of_data
from rmq_pipeline.store.database import Database
from rmq_pipeline.store.log.commit_log import CommitLog, FaultPoint
from rmq_pipeline.store.log.stretch import Stretch, Stretches

_LOGGER = logging.getLogger(__name__)

_UNREADABLE_REMEDY: Final = (
    "Check the disk and the system's log. If the file stays damaged, restore it from a copy: the"
    " next start refuses the home."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLimits:
    """Sizes and times of dispatch."""

    #: A transaction takes frames up to this many bytes or rows, and at least one frame. The row
    #: limit is one row group of DuckDB. A full row group is written directly into the database
    #: file. Fewer rows go to the write-ahead log first, which takes ten times the bytes, and a
    #: checkpoint compresses them later.
    transaction_bytes: int = 192 * MIB
    transaction_rows: int = 122_880
    #: With this much undispatched, dispatch does not wait for more frames.
    pressing_bytes: int = 128 * MIB
    #: A synced frame waits this long for more frames when no caller waits for it.
    delay_s: float = 0.2
    #: Retry interval for a frame that the database refuses or that cannot be read.
    retry_s: float = 30.0


class Stuck(NamedTuple):
    """The frame at which dispatch has stopped; all earlier frames are in the database."""

    position: int
    file: str
    #: Byte of the file at which the frame begins.
    byte: int
    why: str
    #: False: dispatch cannot read the frame. True: the database refuses it.
    is_readable: bool

    def __str__(self) -> str:
        place = f"log position {self.position} (byte {self.byte} of {self.file})"
        if self.is_readable:
            return f"The database does not take the frame at {place}: {self.why}"
        return f"Dispatch cannot read the frame at {place}, and tries again: {self.why}"

    @property
    def remedy(self) -> str:
        """Remedy for the operator."""
        return StuckError.remedy if self.is_readable else _UNREADABLE_REMEDY


class StuckError(StorageError):
    """The requested data lies behind a frame that the database refuses."""

    remedy = (
        "Start a version of rmq_pipeline that takes the frame, or report this text. Sends, "
        "receives and acks go on until the disk is full or `dispatch_behind_bytes` is reached."
    )


class Dispatcher:
    """Thread that keeps a database at most about 0.3 s behind its log.

    Args:
        on_failure: called once, from the dispatch thread, when a transaction fails. The thread has
            ended, and the broker must stop too. Not called if the log failed or was closed: the
            log's owner then creates another dispatcher with another log.
        on_full: called from the dispatch thread when the disk is full; returns True if it has freed
            space and the transaction can be retried.
        fault: called before and after each transaction with the name of the step.
        limits: sizes and times.
    """

    def __init__(
        self,
        log: CommitLog,
        database: Database,
        *,
        on_failure: Callable[[Exception], None],
        on_full: Callable[[StoreFullError], bool] = lambda _: False,
        fault: FaultPoint | None = None,
        limits: DispatchLimits = DispatchLimits(),
    ) -> None:
        self._log = log
        self._limits = limits
        self._stretches = Stretches(log)
        self._database = database
        self._on_failure = on_failure
        self._on_full = on_full
        self._fault = fault
        self._lock = threading.Lock()
        #: Wakes the dispatch thread.
        self._work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        #: The largest position notified, and the largest one that a caller waits for.
        self._noticed = 0
        self._wanted = 0
        self._sleeps = False
        self._over = False
        #: The frame at which dispatch has stopped; None while it proceeds.
        self.stuck: Stuck | None = None
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="dispatch", daemon=True)

    @property
    def behind_bytes(self) -> int:
        """Bytes of the synced log that are not in the database."""
        return max(0, self._log.synced - self._database.dispatched)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after its current transaction; the log keeps the remaining frames."""
        self._end(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def notify(self, position: int) -> None:
        """Tell dispatch the end of the log. Called by the writer thread after every frame."""
        self._noticed = position
        # Waking a thread for every frame would take the interpreter lock from the writer. While
        # dispatch is awake it checks the log itself. It sets ``_sleeps`` before its last check, so
        # no frame is missed.
        if self._sleeps or self._is_pressing():
            with self._lock:
                self._work.notify()

    def wait_for(self, position: int, timeout_s: float | None = None) -> bool:
        """Wait until all frames before a synced position are in the database.

        Returns:
            False if the time ran out.

        Raises:
            StuckError: a frame before the position cannot be dispatched.
            StorageError: dispatch has failed or was stopped.
        """
        if self._database.dispatched >= position:
            return True
        with self._lock:
            if (stuck := self.stuck) is not None:
                raise StuckError(str(stuck), remedy=stuck.remedy)
            self._wanted = max(self._wanted, position)
            self._work.notify()
            self._done.wait_for(
                lambda: self._over or self.stuck or self._database.dispatched >= position, timeout_s
            )
        if self._database.dispatched >= position:
            return True
        if self._over:
            raise StorageError("Dispatch has ended.") from self._failure
        if (stuck := self.stuck) is not None:
            raise StuckError(str(stuck), remedy=stuck.remedy)
        return False

    def _run(self) -> None:
        try:
            while self._rest():
                try:
                    self._move()
                except (_RefusedError, _UnreadableError) as error:
                    self._stick(error)
        except _LogGoneError as error:
            self._end(error)
        except Exception as error:  # noqa: BLE001 the broker must learn of any failure
            self._end(error)
            self._on_failure(error)

    def _stick(self, error: "_RefusedError | _UnreadableError") -> None:
        """Record the frame that cannot be dispatched, and wait before it is retried."""
        position = self._database.dispatched
        with _reading():
            file = self._log.file_of(position)
        cause = error.__cause__
        why = cause.message if isinstance(cause, RocketMQError) else f"{cause!r}"
        is_readable = isinstance(error, _RefusedError)
        stuck = Stuck(position, str(file.path), file.offset_of(position), why, is_readable)
        if stuck != self.stuck:
            _LOGGER.error("%s %s", stuck, stuck.remedy)
        with self._lock:
            self.stuck = stuck
            self._done.notify_all()
            self._work.wait_for(lambda: self._over, self._limits.retry_s)

    def _end(self, failure: Exception | None) -> None:
        with self._lock:
            self._over = True
            self._failure = self._failure or failure
            self._work.notify()
            self._done.notify_all()

    def _rest(self) -> bool:
        """Wait for work, then briefly for more of it; return False when dispatch ends."""
        with self._lock:
            while not self._over:
                self._sleeps = True
                if self.behind_bytes:
                    break
                # With flush = async a frame is notified before it is on disk: check again.
                self._sleeps = self._noticed <= self._log.synced
                self._work.wait(None if self._sleeps else self._limits.delay_s)
            self._sleeps = False
            self._work.wait_for(lambda: self._over or self._is_pressing(), self._limits.delay_s)
            return not self._over

    def _is_pressing(self) -> bool:
        reached, synced = self._database.dispatched, self._log.synced
        return (
            min(self._wanted, synced) > reached or synced - reached >= self._limits.pressing_bytes
        )

    def _move(self) -> None:
        start, stop = self._database.dispatched, self._log.synced
        if self.stuck is not None:  # later frames need not be read until this one is applied
            with _reading():
                frame = next(self._stretches.singly(start, stop))
            self._dispatch([frame])
            start = self._database.dispatched
        stretches = self._stretches.between(start, stop)
        while not self._over and (some := self._take(stretches)):
            self._dispatch(some)
            reached = self._database.dispatched
            if stop - reached < reached - start and not self._is_pressing():
                break  # the remaining rows do not fill a row group
            start = reached

    def _take(self, stretches: Iterator[Stretch]) -> list[Stretch]:
        """Return the frames of one transaction."""
        limits, taken = self._limits, list[Stretch]()
        start, count = self._database.dispatched, 0
        try:
            with _reading():
                for stretch in stretches:
                    taken.append(stretch)
                    count += sum(rows.batch.num_rows for rows in stretch.rows)
                    size = stretch.end - start
                    if count >= limits.transaction_rows or size >= limits.transaction_bytes:
                        break
        except _UnreadableError:
            if not taken:
                raise
        return taken  # the next call begins with the unreadable frame

    def _dispatch(self, some: list[Stretch]) -> None:
        """Apply frames. If their data is refused, halve the list until the bad frame is alone.

        Raises:
            _RefusedError: the database refuses a frame; all earlier frames were applied.
            _UnreadableError: a frame cannot be read again; all earlier frames were applied.
        """
        parts = [some]
        while parts:
            part = parts.pop()
            try:
                moved = self._transact(part)
            except Exception as error:
                if not is_of_data(error):
                    raise
                if halves := self._halves(part):
                    parts.extend(reversed(halves))
                    continue
                moved = self._dispatch_sound(part[0])
            if not moved:
                return
            with self._lock:
                self.stuck = None
                self._done.notify_all()

    def _transact(self, some: list[Stretch]) -> bool:
        """Apply frames in one transaction; return False if dispatch was stopped first."""
        self._step("before_dispatch")
        while True:
            try:
                self._database.dispatch(some)
            except StoreFullError as error:
                if self._over:  # the log keeps the frames for the next start
                    return False
                if not self._on_full(error):
                    raise
            else:
                self._step("dispatched")
                return True

    def _halves(self, part: list[Stretch]) -> list[list[Stretch]]:
        """Return the two halves of the frames, or no halves of a single frame."""
        if len(part) == 1:
            with _reading():
                part = list(self._stretches.singly(self._database.dispatched, part[0].end))
        middle = len(part) // 2
        return [part[:middle], part[middle:]] if middle else []

    def _dispatch_sound(self, frame: Stretch) -> bool:
        """Apply a frame after replacing bad UTF-8; return False if dispatch was stopped first.

        Raises:
            _RefusedError: the database refuses the frame for another reason.
        """
        position = self._database.dispatched
        try:
            moved = self._transact([frame.with_sound_texts()])
        except Exception as error:
            if not is_of_data(error):
                raise
            raise _RefusedError from error
        if moved:
            _LOGGER.warning(
                "bad UTF-8 in texts was replaced in the database; the log keeps it: position=%d",
                position,
            )
        return moved

    def _step(self, name: str) -> None:
        if self._fault:
            self._fault(name)


@contextmanager
def _reading() -> Iterator[None]:
    """Distinguish a closed or failed log from a frame that cannot be read now."""
    try:
        yield
    except StorageError as error:
        raise _LogGoneError from error
    except (CorruptLogError, OSError) as error:
        raise _UnreadableError from error


class _RefusedError(Exception):
    """The database refuses a frame; ``__cause__`` says why."""


class _UnreadableError(Exception):
    """A frame of the log cannot be read; ``__cause__`` says why."""


class _LogGoneError(Exception):
    """The log is closed or has failed."""
