"""Dead-letter failures: messages that cannot be copied, skipped until the next retry.

Such a message is damaged or gone until an operator restores a file. Other dead-lettering skips it.
The broker logs it once, revive reports it once, and the broker retries it at intervals.
"""

import logging
import threading
from collections.abc import Mapping
from typing import Final

import numpy as np

from rmq_pipeline.broker.state.consumption import QueueKey
from rmq_pipeline.errors import StorageError
from rmq_pipeline.message import Int64s

log = logging.getLogger(__name__)

#: Longest time between retries.
_AGAIN_MS: Final = 60_000
#: First interval after the store has failed, which may pass soon.
_SOON_MS: Final = 5_000


class DeadLetterFailures:
    """Dead-letter failures of one broker by queue and offset; safe for all threads.

    They are kept in memory only, because each start retries all of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[QueueKey, set[int]] = {}
        self._untold: Exception | None = None
        self._tried_ms = 0
        self._wait_ms = _AGAIN_MS

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._kept.values()))

    def offsets(self) -> dict[QueueKey, Int64s]:
        """Return the offsets of each queue."""
        with self._lock:
            return {key: np.array([*kept], np.int64) for key, kept in self._kept.items()}

    def note(self, key: QueueKey, tried: Int64s, *, kept: Mapping[int, Exception]) -> None:
        """Record that the ``tried`` offsets were retried and the ``kept`` ones failed.

        Log the messages whose failure is new.
        """
        with self._lock:
            before = self._kept.pop(key, set())
            new = [offset for offset in kept if offset not in before]
            left = before.difference(tried.tolist()).union(kept)
            if left:
                self._kept[key] = left
            if not new:
                return
            self._untold = self._untold or kept[new[0]]
            if any(isinstance(kept[offset], StorageError) for offset in new):
                self._wait_ms = _SOON_MS
        log.error(
            "%d messages of %s are exhausted and cannot be dead-lettered, the first at offset %d",
            len(new),
            key,
            new[0],
            exc_info=kept[new[0]],
        )

    def forget(self, key: QueueKey, offsets: Int64s) -> None:
        """Drop these offsets: they are marked again, so the old failure no longer applies."""
        self.note(key, offsets, kept={})

    def are_only(self, found: Mapping[QueueKey, Int64s]) -> None:
        """Replace all failures with ``found``, after a retry of all messages."""
        with self._lock:
            self._kept = {key: set(offsets.tolist()) for key, offsets in found.items()}

    def take_time(self, now_ms: int) -> bool:
        """Return True at most once per retry interval."""
        with self._lock:
            is_time = now_ms >= self._tried_ms + self._wait_ms
            if is_time:
                self._tried_ms, self._wait_ms = now_ms, min(_AGAIN_MS, 2 * self._wait_ms)
            return is_time

    def take_untold(self) -> Exception | None:
        """Return the error of one new failure, or None without a new one since the last call."""
        with self._lock:
            untold, self._untold = self._untold, None
            return untold
