"""Checks that wait to be asked: of a live producer of the group, else of whoever knows the topic.

They are held in memory only. One that gets lost is asked again at the half message's next check.
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.state import Window
from rmq_pipeline.broker.transactions.askers import ALL, Askers
from rmq_pipeline.broker.transactions.halves import HALF, Rows
from rmq_pipeline.message import Int64s

#: No topic has this id: the bell of new offers.
NEW_OFFERS: Final = -2


class Offers:
    """Counted checks by producer group, each group's in the order they came in line.

    Any thread may use it. One that nobody came for stays in its place when it has fallen due, but
    is not given until the sweep has offered it again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, Rows] = {}
        self._askers = Askers()

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._rows.values()))

    def offer(self, producer_group: str, rows: Rows) -> None:
        """Add rows of HALF; one that waits already keeps its place in line."""
        with self._lock:
            before = self._rows.get(producer_group)
            if before is not None:
                again = np.isin(rows["queue_offset"], before["queue_offset"])
                if again.any():
                    order = np.argsort(before["queue_offset"])
                    offsets = rows["queue_offset"][again]
                    at = np.searchsorted(before["queue_offset"], offsets, sorter=order)
                    before[order[at]] = rows[again]
                rows = np.concatenate([before, rows[~again]])
            self._rows[producer_group] = rows

    def put_back(self, producer_group: str, rows: Rows) -> None:
        """Offer what was taken and not given, first of all again, unless it was meanwhile."""
        with self._lock:
            before = self._rows.get(producer_group)
            if before is not None:
                again = np.isin(rows["queue_offset"], before["queue_offset"])
                rows = np.concatenate([rows[~again], before])
            self._rows[producer_group] = rows

    def take(
        self,
        now_ms: int,
        *,
        producer_group: str | None,
        topic_ids: Sequence[int] | None,
        limit: int,
        window: tuple[str, int] | None = None,
    ) -> dict[str, Rows]:
        """Checks for whoever asks, by producer group; they are not offered again.

        Args:
            now_ms: what fell due by then waits for the sweep, and is not given before.
            producer_group: whose producer asks; None for anyone, who gets no check that a live
                producer of its group asks for.
            topic_ids: of the topics asked about; None for all.
            limit: of rows.
            window: of the run that asks.
        """
        with self._lock:
            self._askers.note(producer_group, now_ms, topic_ids=topic_ids, window=window)
            names = [producer_group] if producer_group is not None else list(self._rows)
            found: dict[str, Rows] = {}
            for name in names:
                if limit <= 0:
                    break
                own = producer_group is not None
                claimed = () if own else self._askers.claimed(name, now_ms)
                if ALL in claimed:
                    continue
                taken = self._take_of(
                    name, now_ms, topic_ids=topic_ids, claimed=claimed, limit=limit
                )
                if len(taken):
                    found[name] = taken
                    limit -= len(taken)
            return found

    def waiting(self, now_ms: int, *, windows: Mapping[str, Window]) -> Int64s:
        """Offsets of the checks that nobody came for yet, though somebody asks about their topics.

        Args:
            now_ms: who has asked within PRODUCER_LIVE_MS before is there,
            windows: and so is a run that asked and whose window is live.
        """
        with self._lock:
            found = [np.empty(0, dtype=np.int64)]
            for name, rows in self._rows.items():
                topic_ids = self._askers.topics(name, now_ms, windows=windows)
                if topic_ids:
                    found.append(rows["queue_offset"][_about(rows, topic_ids)])
        return np.concatenate(found)

    def forget(self, now_ms: int) -> None:
        """Let go of those that have fallen due: all half messages that are due have been swept."""
        with self._lock:
            for name, rows in list(self._rows.items()):
                fresh = rows["due_ms"] > now_ms
                if not fresh.all():
                    self._keep(name, rows[fresh])

    def _keep(self, name: str, rows: Rows) -> None:
        if len(rows):
            self._rows[name] = rows
        else:
            del self._rows[name]

    def _take_of(
        self,
        name: str,
        now_ms: int,
        *,
        topic_ids: Sequence[int] | None,
        claimed: Collection[int],
        limit: int,
    ) -> Rows:
        rows = self._rows.get(name)
        if rows is None:
            return np.zeros(0, HALF)
        asked = (rows["due_ms"] > now_ms) & ~np.isin(rows["target_topic_id"], list(claimed))
        if topic_ids is not None:
            asked &= _about(rows, topic_ids)
        wanted = np.flatnonzero(asked)[:limit]
        if len(wanted):
            stays = np.ones(len(rows), dtype=np.bool_)
            stays[wanted] = False
            # Last of the groups: whoever takes a few at a time comes to each of them.
            del self._rows[name]
            if stays.any():
                self._rows[name] = rows[stays]
        return rows[wanted]


def _about(rows: Rows, topic_ids: Collection[int]) -> npt.NDArray[np.bool_]:
    if ALL in topic_ids:
        return np.ones(len(rows), dtype=np.bool_)
    return np.isin(rows["target_topic_id"], list(topic_ids))
