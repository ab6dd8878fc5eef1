"""State of a failed store: the cause, the time, and the next attempt to rebuild it."""

import logging
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

from rmq_pipeline.errors import (
    LogFencedError,
    OperatorError,
    RocketMQError,
    StandbyError,
    StorageError,
)
from rmq_pipeline.store.dispatch import Stuck

log = logging.getLogger(__name__)

#: First and longest pause between two attempts.
_FIRST_PAUSE_S: Final = 0.1
_LAST_PAUSE_S: Final = 2.0
#: A store that fails again within this time is rebuilt only after a pause.
_CALM_S: Final = 10.0
#: If an invalidated DuckDB cannot be reopened for this long, the process must be replaced.
_UNREPAIRABLE_S: Final = 30.0


class Repair:
    """Failures of a store, and attempts to rebuild it; safe for all threads.

    A failed write or sync is never repeated. Callers get a StorageError, and the state in memory is
    rebuilt from disk. If the rebuild fails too, it is retried until it works.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Set if there is work before the next regular look.
        self.wakes = threading.Event()
        #: Cause of the failure; None: the store works.
        self.why: BaseException | None = None
        self._since_s = 0.0
        self._last_attempt_s = -_CALM_S
        self._pause_s = _FIRST_PAUSE_S
        self._attempts = 0
        self._repairs = 0
        self._last_why = ""
        #: Called with the cause if this process cannot rebuild the store but another one can.
        self.on_unrepairable: Callable[[str], None] = lambda _: None

    def failed(self, why: BaseException) -> None:
        """Record a failure; the first cause is kept."""
        with self._lock:
            if self.why is None:
                self.why, self._since_s = why.with_traceback(None), time.monotonic()
                self._last_why = text_of(why)
        self.wakes.set()

    def next_attempt_s(self) -> float:
        """Count the next attempt; return the pause before it in seconds."""
        now = time.monotonic()
        with self._lock:
            if now - self._last_attempt_s > _CALM_S:
                self._pause_s = _FIRST_PAUSE_S
            else:
                self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
            self._attempts += 1
            self._last_attempt_s = now + self._pause_s
            return self._pause_s

    def mended(self) -> None:
        """Record that the store was rebuilt."""
        with self._lock:
            if self.why is None:
                return
            why, self.why = self.why, None
            away_s = time.monotonic() - self._since_s
            self._repairs += 1
        log.warning(
            "The store was rebuilt from disk %.1f s after it failed: %s", away_s, text_of(why)
        )

    def not_mended(self, why: BaseException, *, is_unrepairable: bool) -> None:
        """Record a failed attempt."""
        self.failed(why)
        away_s = time.monotonic() - self._since_s
        log.error(
            "The store has failed for %.1f s and is not rebuilt yet: %s", away_s, text_of(why)
        )
        if is_unrepairable and away_s > _UNREPAIRABLE_S:
            self.on_unrepairable(text_of(why))

    def report(self, stuck: Stuck | None = None) -> dict[str, Any]:
        """Return the facts for the broker's status.

        Args:
            stuck: frame that dispatch cannot process; None: none.
        """
        with self._lock:
            failing = self.why is not None
            return {
                "failing": text_of(self.why) if self.why is not None else None,
                "failing_s": round(time.monotonic() - self._since_s, 1) if failing else 0.0,
                "attempts": self._attempts,
                "repairs": self._repairs,
                "last_failure": self._last_why or None,
                "stuck": str(stuck) if stuck is not None else None,
            }


def refusal(why: BaseException) -> OperatorError | StandbyError:
    """Return the error for requests until the store is rebuilt, or permanently."""
    if isinstance(why, LogFencedError):
        return LogFencedError(why.message)
    if isinstance(why, StandbyError):
        return StandbyError(why.message)
    return StorageError(
        f"The broker's store has failed and is being rebuilt from disk: {text_of(why)}"
    )


def text_of(why: BaseException) -> str:
    """Return the message of an error without its remedy."""
    return why.message if isinstance(why, RocketMQError) else str(why)


def forget_frames(error: BaseException) -> None:
    """Drop the local variables in the frames of an error and its causes."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
