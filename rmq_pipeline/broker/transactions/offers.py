"""Checks that wait to be asked: of a live producer of the group, else of whoever knows the topic.

They are held in memory only. One that gets lost is asked again at the half message's next check.
"""

import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from rmq_pipeline import limits
from rmq_pipeline.broker.transactions.halves import HALF, Rows

#: No topic has this id: the bell of new offers.
NEW_OFFERS: Final = -2
#: No topic has this id, either: whoever asks about all of them.
_ALL: Final = -1
#: Producer groups of which those that are gone are forgotten.
_MANY: Final = 1_000


class Offers:
    """Counted checks by producer group. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, Rows] = {}
        #: When a producer group last asked for its checks, by the topic it asked about.
        self._polled_ms: dict[str, dict[int, int]] = {}

    def offer(self, producer_group: str, rows: Rows, *, now_ms: int) -> None:
        """Add rows of HALF; older checks of the same half messages go, and those that were lost."""
        with self._lock:
            before = self._rows.get(producer_group)
            if before is not None:
                again = np.isin(before["queue_offset"], rows["queue_offset"])
                rows = np.concatenate([before[~again & (before["due_ms"] > now_ms)], rows])
            self._rows[producer_group] = rows

    def take(
        self,
        now_ms: int,
        *,
        producer_group: str | None,
        topic_ids: Sequence[int] | None,
        limit: int,
    ) -> dict[str, Rows]:
        """Checks for whoever asks, by producer group; they are not offered again.

        Args:
            now_ms: what fell due by then was lost, and is not given any more.
            producer_group: whose producer asks; None for anyone, who gets no check that a live
                producer of its group asks for.
            topic_ids: of the topics asked about; None for all.
            limit: of rows.
        """
        with self._lock:
            if producer_group is not None:
                self._note(producer_group, now_ms, topic_ids=topic_ids)
            names = [producer_group] if producer_group is not None else list(self._rows)
            found: dict[str, Rows] = {}
            for name in names:
                claimed = () if producer_group is not None else self._claimed(name, now_ms)
                if _ALL in claimed:
                    continue
                taken = self._take_of(
                    name, now_ms, topic_ids=topic_ids, claimed=claimed, limit=limit
                )
                if len(taken):
                    found[name] = taken
                    limit -= len(taken)
            return found

    def _note(self, producer_group: str, now_ms: int, *, topic_ids: Sequence[int] | None) -> None:
        """A producer of this group is there, and asks about these topics."""
        if len(self._polled_ms) >= _MANY:
            live = [name for name in self._polled_ms if self._claimed(name, now_ms)]
            self._polled_ms = {name: self._polled_ms[name] for name in live}
        polled = self._polled_ms.setdefault(producer_group, {})
        polled.update(dict.fromkeys((_ALL,) if topic_ids is None else topic_ids, now_ms))

    def _claimed(self, producer_group: str, now_ms: int) -> Sequence[int]:
        """The topics about which a live producer of the group asks."""
        polled = self._polled_ms.get(producer_group, {})
        return [
            topic_id
            for topic_id, at_ms in polled.items()
            if now_ms - at_ms < limits.PRODUCER_LIVE_MS
        ]

    def _take_of(
        self,
        name: str,
        now_ms: int,
        *,
        topic_ids: Sequence[int] | None,
        claimed: Sequence[int],
        limit: int,
    ) -> Rows:
        rows = self._rows.get(name)
        if rows is None:
            return np.zeros(0, HALF)
        fresh = rows["due_ms"] > now_ms
        asked = fresh & ~np.isin(rows["target_topic_id"], claimed)
        if topic_ids is not None:
            asked &= np.isin(rows["target_topic_id"], topic_ids)
        wanted: npt.NDArray[np.intp] = np.flatnonzero(asked)[: max(limit, 0)]
        fresh[wanted] = False
        if fresh.any():
            self._rows[name] = rows[fresh]
        else:
            del self._rows[name]
        return rows[wanted]
