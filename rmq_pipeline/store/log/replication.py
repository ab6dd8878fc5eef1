"""Appends of a commit log to its store, next to the writes of the local files.

``sync``: a frame is sent to the store, written locally meanwhile, and counts once both have it.
``async``: a frame counts once it is written locally. A thread appends it later; at most
``behind_bytes`` wait for that, and may be lost with the home.

If an append fails, the frame is retried at its position until a time limit: the store has it, or
takes it now, or another broker leads. After the limit the caller gets a LogStoreError. The engine
then opens the log again, and ``catching_up.meet`` decides what became of the frame.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

from rmq_pipeline.errors import LogFencedError, LogStoreError
from rmq_pipeline.store.log.log_store import LogStore

log = logging.getLogger(__name__)

Mode: TypeAlias = Literal["sync", "async"]
#: First and longest pause between two tries of one append.
_FIRST_PAUSE_S: Final = 0.05
_LAST_PAUSE_S: Final = 0.5
#: Renewals within one lease.
_RENEWALS: Final = 4


def _lease_clock_s() -> float:
    """Return the time for the lease. The monotonic clock of Linux stops while a machine sleeps."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class Replication:
    """Replication of one log to a store that this broker leads. Thread-safe but for ``write``."""

    def __init__(
        self,
        store: LogStore,
        *,
        mode: Mode,
        lease_s: float,
        timeout_s: float,
        behind_bytes: int,
        gather_s: float = 0.0,
    ) -> None:
        """Prepare; ``start`` begins to renew the lease of a store that was claimed.

        Args:
            timeout_s: time in which a frame is retried before its callers get an error.
            behind_bytes: most bytes of frames that only the home has, if the mode is async.
            gather_s: how long a frame waits for further requests, because each append costs money.
        """
        self.store = store
        self.mode = mode
        #: The first epoch of this broker's leadership; those of earlier leaders are lower.
        self.first_epoch = store.epoch
        self.gather_s = gather_s
        #: Log position up to which the store has the log.
        self.confirmed = 0
        #: Why this broker may not answer any more; None: it leads.
        self.fenced: LogFencedError | None = None
        #: Called once, in any thread, when another broker has begun to lead.
        self.on_fenced: Callable[[LogFencedError], None] = lambda _: None
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._behind_bytes = behind_bytes
        self._fresh_until = 0.0
        #: Guards the outcome of renewals; only one thread renews, and callers wait for it.
        self._lease = threading.Condition(threading.Lock())
        self._is_asked = False
        self._renewals = 0
        self._failed_until = 0.0
        self._lease_failure = ""
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        #: Frames for the thread that appends, and what has gone wrong there.
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition(threading.Lock())
        self._appending = False
        self._paused = True
        self._failure = ""
        self._has_met = False

    def start(self) -> None:
        """Renew the lease from now on, and append the frames that ``write`` leaves."""
        self._renew()
        runs = [("rmq-log-lease", self._keep_lease)]
        if self.mode == "async":
            runs.append(("rmq-log-store", self._append_waiting))
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in runs]
        for thread in self._threads:
            thread.start()

    # ---------------------------------------------------------------------------------- the lease

    def check(self) -> None:
        """Check that no other broker can have begun to lead.

        After a lost lease, wait for one renewal, at most a lease long. A failed renewal refuses
        later callers at once, until the next one is due.

        Raises:
            LogFencedError: another broker leads.
            LogStoreError: the store does not answer, so another broker may lead.
        """
        if self.fenced is not None:
            raise self.fenced
        if not self.lease_runs:
            self._wait_for_lease()

    @property
    def lease_runs(self) -> bool:
        """Return True while no other broker can lead, as far as the last renewal tells."""
        return _lease_clock_s() < self._fresh_until

    def _wait_for_lease(self) -> None:
        with self._lease:
            if _lease_clock_s() >= self._failed_until and not self._closing.is_set():
                before = self._renewals
                self._is_asked = True
                self._lease.notify_all()
                self._lease.wait_for(
                    lambda: self.fenced is not None or self._renewals > before,
                    min(self._timeout_s, self._lease_s),
                )
            if self.fenced is not None:
                raise self.fenced
            if not self.lease_runs:
                raise LogStoreError(
                    f"The lease of the commit log in {self.store.address} is over:"
                    f" {self._lease_failure or 'it was not renewed in time.'}"
                )

    def _renew(self) -> None:
        # Measured before the question: the server's lease ends later than this one.
        began = _lease_clock_s()
        if not self.store.renew():
            error = LogFencedError(
                f"Another broker has begun to lead the commit log in {self.store.address}."
            )
            self.fence(error)
            raise error
        self._fresh_until = began + self._lease_s

    def _keep_lease(self) -> None:
        while self._next_renewal():
            failure = ""
            try:
                self._renew()
            except LogFencedError:
                return
            except LogStoreError as error:
                failure = error.message
                log.warning("The lease of the commit log was not renewed: %s", failure)
            except Exception as error:  # without this thread no answer is possible
                failure = repr(error)
                log.exception("The lease of the commit log was not renewed.")
            with self._lease:
                self._lease_failure = failure
                if failure:
                    self._failed_until = _lease_clock_s() + self._lease_s / _RENEWALS
                self._renewals += 1
                self._lease.notify_all()

    def _next_renewal(self) -> bool:
        """Return True when a renewal is due or asked for; False once this closes."""
        with self._lease:
            self._lease.wait_for(
                lambda: self._is_asked or self._closing.is_set(), self._lease_s / _RENEWALS
            )
            self._is_asked = False
            return not self._closing.is_set()

    def fence(self, error: LogFencedError) -> None:
        """Refuse everything from now on: another broker leads."""
        with self._changed:
            first, self.fenced = self.fenced is None, self.fenced or error
            self._changed.notify_all()
        with self._lease:
            self._lease.notify_all()
        if first:
            log.critical("Another broker leads: %s", error.message)
            self.on_fenced(error)

    # ------------------------------------------------------------------------------------- writes

    def wait_for(self, position: int) -> None:
        """Wait until the store has the log up to a position, as long as it gets more of it.

        Raises:
            LogFencedError: another broker leads.
            LogStoreError: the store got nothing more for the time limit.
        """
        with self._changed:
            before = -1
            while self.fenced is None and before < self.confirmed < position:
                before = self.confirmed
                self._changed.wait_for(
                    lambda: self.fenced is not None or self.confirmed >= position, self._timeout_s
                )
            if self.fenced is not None:
                raise self.fenced
            if self.confirmed < position:
                raise LogStoreError(
                    f"The store of the log is {position - self.confirmed} bytes behind."
                    f" {self._failure}"
                )

    def write(self, position: int, frame: bytes, *, local: Callable[[], None]) -> None:
        """Write a frame to the store and, by ``local``, to the local file.

        For one thread at a time, in the order of positions.

        Raises:
            LogFencedError: another broker leads; the frame is not in the log.
            LogStoreError: the store may have the frame: it did not confirm it in time, the local
                write failed, or another broker leads meanwhile. Or the store is too far behind.
            OSError: the local write failed, and the store lacks the frame.
        """
        if self.mode == "async":
            self.check()
            self._wait_for_place()
            local()
            self._leave(position, frame)
            return
        if self.fenced is not None:
            raise self.fenced
        written = False
        try:
            self.store.begin(position, frame)
            local()
            written = True
            self.store.finish()
        except LogStoreError as error:
            if not written:
                local()
            self._settle(position, frame, why=error)
        except LogFencedError as error:
            self.fence(error)
            raise
        except OSError as error:
            self.store.abandon()
            raise LogStoreError(
                f"The frame at position {position} was not written locally, and the store may have"
                f" it: {error}.",
                remedy="Check the disk; the broker rebuilds its state from the commit log.",
            ) from error
        self.confirmed = position + len(frame)

    def _settle(self, position: int, frame: bytes, *, why: LogStoreError) -> None:
        """Retry a frame at its position until it is stored, or the time is over.

        Raises:
            LogStoreError: the store may have the frame, also if another broker leads by now.
        """
        give_up_at, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while True:
            try:
                self.store.settle(position, frame)
            except LogFencedError as error:
                self.fence(error)
                raise LogStoreError(
                    f"{error.message} The log may have the frame at position {position}.",
                    remedy="Ask the broker that leads.",
                ) from error
            except LogStoreError as error:
                why = error
            else:
                return
            left_s = give_up_at - time.monotonic()
            if left_s <= 0 or self._closing.wait(min(pause_s, left_s)):
                raise why
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _wait_for_place(self) -> None:
        with self._changed:
            self._changed.wait_for(self._has_place, self._timeout_s)
            if self.fenced is not None:
                raise self.fenced
            if not self._has_place():
                raise LogStoreError(
                    f"The store of the log is {self._waiting_bytes} bytes behind: {self._failure}"
                )

    def _has_place(self) -> bool:
        return self.fenced is not None or self._waiting_bytes < self._behind_bytes

    def _leave(self, position: int, frame: bytes) -> None:
        with self._changed:
            self._waiting.append((position, frame))
            self._waiting_bytes += len(frame)
            self._changed.notify_all()

    def _append_waiting(self) -> None:
        """Append the frames that ``write`` has left, in order; a failed append is retried."""
        try:
            while (found := self._next()) is not None:
                if not self._append_one(*found):
                    return
                self._appended(*found)
        finally:
            with self._changed:
                self._appending = False
                self._changed.notify_all()

    def _append_one(self, position: int, frame: bytes) -> bool:
        """Append a frame; return False if this broker is fenced or closes."""
        try:
            self.store.append(position, frame)
        except LogFencedError as error:
            self.fence(error)
            return False
        except Exception as error:  # noqa: BLE001 without this thread sends are refused
            return self._appended_late(position, frame, why=_as_log_store_error(error))
        return True

    def _next(self) -> tuple[int, bytes] | None:
        """Return the next frame; None once nothing is left to do."""
        with self._changed:
            self._appending = False
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    self.fenced is not None
                    or (self._waiting and not self._paused)
                    or (self._closing.is_set() and not self._waiting)
                )
            )
            if self.fenced is not None or not self._waiting:
                return None
            self._appending = True
            return self._waiting[0]

    def _appended_late(self, position: int, frame: bytes, *, why: LogStoreError) -> bool:
        while True:
            self._failure = why.message
            try:
                self._settle(position, frame, why=why)
            except Exception as error:  # noqa: BLE001 as above
                why = _as_log_store_error(error)
                if self._closing.is_set() or self.fenced is not None:
                    return False
                if self._paused:  # the log is opened again, and leaves its frames again
                    return True
            else:
                self._failure = ""
                return True

    def _appended(self, position: int, frame: bytes) -> None:
        with self._changed:
            if self._waiting and self._waiting[0][0] == position and not self._paused:
                self._waiting.popleft()
                self._waiting_bytes -= len(frame)
                self.confirmed = position + len(frame)
            self._changed.notify_all()

    # ------------------------------------------------------------------------- opening and closing

    def begin_meeting(self) -> int | None:
        """Lead again under a new epoch, for the log's opening, which compares both sides.

        Returns:
            The position from which on frames have failed in this process; None at its start.

        Raises:
            LogFencedError: another broker has begun to lead.
        """
        if not self._has_met:
            self._has_met = True
            return None
        if self.fenced is not None:
            raise self.fenced
        self._pause()
        try:
            self.store.reclaim()
        except LogFencedError as error:
            self.fence(error)
            raise
        return self.confirmed

    def _pause(self) -> None:
        """Forget the frames that wait, and return when none is being appended."""
        with self._changed:
            self._paused = True
            self._waiting.clear()
            self._waiting_bytes = 0
            self._changed.wait_for(lambda: not self._appending)

    def go_on(self, confirmed: int) -> None:
        """Take frames from a position on, up to which the store has the log."""
        with self._changed:
            self.confirmed = confirmed
            self._paused = False
            self._changed.notify_all()

    def report(self, end: int) -> dict[str, Any]:
        """Return the facts for the broker's status.

        Args:
            end: end of the log.
        """
        return {
            "role": "leader",
            "store": self.store.address,
            "replication": self.mode,
            "epoch": self.store.epoch,
            "confirmed": self.confirmed,
            "behind_bytes": max(0, end - self.confirmed),
            "lease_runs": self.lease_runs,
            "failing": self._failure or None,
        }

    def close(self) -> None:
        """Append what waits, as far as the time limit allows, and end the lease. Idempotent."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.fenced is not None or not self._waiting, self._timeout_s
            )
            left = self._waiting_bytes
            self._closing.set()
            self._changed.notify_all()
        with self._lease:
            self._lease.notify_all()
        if left:
            log.warning("The store lacks the last %d bytes; the next start adds them.", left)
        for thread in self._threads:
            thread.join(self._timeout_s)
        self.store.close()


def _as_log_store_error(error: Exception) -> LogStoreError:
    if isinstance(error, LogStoreError):
        return error
    log.error("An append to the log's store failed.", exc_info=error)
    return LogStoreError(f"An append to the log's store failed: {error!r}.")
