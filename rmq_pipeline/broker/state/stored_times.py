"""Storage times of a queue's offsets, in memory and thinned out with age."""

from array import array
from bisect import bisect_right
from typing import Final

#: Least time between two marks.
SPACING_MS: Final = 1_000
#: Most marks of a queue, 16 bytes each. A week needs 100 of them.
MOST: Final = 160
#: Marks are thinned out until two are up to 1/4 of their age apart.
_SHARE: Final = 4


class StoredTimes:
    """Marks of a queue: offsets, and when the message at each offset was stored.

    They tell the age of a message from the first mark on: to 1 s, or for old messages at most a
    quarter of it too high. A restart keeps only the marks of the log that recovery reads.
    """

    __slots__ = ("_at_ms", "_offsets", "next_ms")

    def __init__(self) -> None:
        self._offsets = array("q")
        self._at_ms = array("q")
        #: No mark is needed for messages stored before this time.
        self.next_ms = 0

    def note(self, offset: int, at_ms: int) -> None:
        """Add a mark: the message at ``offset`` was stored at this time, ``next_ms`` or later."""
        self._offsets.append(offset)
        self._at_ms.append(at_ms)
        self.next_ms = at_ms + SPACING_MS
        if len(self._offsets) >= MOST:
            self._thin_out(at_ms)

    def at(self, offset: int) -> int | None:
        """Return when the message was stored, or a little before; None: before the first mark."""
        mark = bisect_right(self._offsets, offset) - 1
        return self._at_ms[mark] if mark >= 0 else None

    def _thin_out(self, now_ms: int) -> None:
        """Drop marks whose neighbours are near enough to each other, from the newest on."""
        kept = [len(self._at_ms) - 1]
        for mark in range(len(self._at_ms) - 2, 0, -1):
            older_ms = self._at_ms[mark - 1]
            if self._at_ms[kept[-1]] - older_ms > (now_ms - older_ms) // _SHARE:
                kept.append(mark)
        kept.append(0)
        kept = kept[: MOST * 3 // 4][::-1]
        self._offsets = array("q", (self._offsets[mark] for mark in kept))
        self._at_ms = array("q", (self._at_ms[mark] for mark in kept))
