"""Doomed messages that could not be buried: passed over until it is time to try them again.

They are damaged or gone, and stay so until somebody restores a file. Whoever buries what he has
doomed has nothing to do with them: they are logged once, told by revive once, and tried now and
then.
"""

import logging
import threading
from collections.abc import Mapping
from typing import Final

import numpy as np

from rmq_pipeline.broker.receiving.scan import QueueKey
from rmq_pipeline.errors import StorageError
from rmq_pipeline.message import Int64s

log = logging.getLogger(__name__)

#: How long they are let be.
_AGAIN_MS: Final = 60_000
#: And at first, where the store has failed: that may be over soon.
_SOON_MS: Final = 5_000


class Unburied:
    """Those of one broker, by queue and offset; in memory only, as each start tries all of them.

    For any thread.
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
        """Which they are."""
        with self._lock:
            return {key: np.array([*kept], np.int64) for key, kept in self._kept.items()}

    def note(self, key: QueueKey, tried: Int64s, *, kept: Mapping[int, Exception]) -> None:
        """Some of a queue were tried, and of these some stay doomed; the new ones are logged."""
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
            "%d messages of %s cannot be buried and stay doomed, the first at offset %d",
            len(new),
            key,
            new[0],
            exc_info=kept[new[0]],
        )

    def forget(self, key: QueueKey, offsets: Int64s) -> None:
        """What was noted of these says nothing any more: they are doomed anew."""
        self.note(key, offsets, kept={})

    def are_only(self, found: Mapping[QueueKey, Int64s]) -> None:
        """All were tried: others are doomed no more."""
        with self._lock:
            self._kept = {key: set(offsets.tolist()) for key, offsets in found.items()}

    def take_time(self, now_ms: int) -> bool:
        """Whether it is time to try them again; then it is not so for a while."""
        with self._lock:
            is_time = now_ms >= self._tried_ms + self._wait_ms
            if is_time:
                self._tried_ms, self._wait_ms = now_ms, min(_AGAIN_MS, 2 * self._wait_ms)
            return is_time

    def take_untold(self) -> Exception | None:
        """Why one cannot be buried, if any is new since this was asked."""
        with self._lock:
            untold, self._untold = self._untold, None
            return untold
