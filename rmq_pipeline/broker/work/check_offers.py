"""Checks waiting for a caller: a live producer of the group, or else a checker of the topic.

They are kept in memory only. A lost one is offered again at the half message's next check.
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from rmq_pipeline import limits
from rmq_pipeline.broker.state.halves import HALF, Rows
from rmq_pipeline.broker.state.state import Window
from rmq_pipeline.message import Int64s

#: No topic has this id; a wakeup under it announces new offers.
NEW_OFFERS: Final = -2
#: Checks are held for this long after ``take``; the caller calls ``keep`` well within it.
_ON_ITS_WAY_MS: Final = 5_000


class Offers:
    """Counted checks by producer group, in the order of their offers; safe for all threads.

    A check that no caller fetched keeps its place after it has fallen due. ``take`` skips it until
    the next sweep offers it again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, Rows] = {}
        self._askers = Askers()
        #: By holder: the offsets of the checks that it works on, and the end of its hold.
        self._held: dict[str, tuple[Int64s, int]] = {}

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._rows.values()))

    def offer(self, producer_group: str, rows: Rows, *, now_ms: int) -> None:
        """Add rows of HALF, except held ones; a check that waits already keeps its place."""
        with self._lock:
            rows = rows[~np.isin(rows["queue_offset"], self._held_offsets(now_ms))]
            if not len(rows):
                return
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
        """Offer checks again, in front, that were taken but not delivered.

        Skip those that were offered again meanwhile.
        """
        with self._lock:
            before = self._rows.get(producer_group)
            if before is not None:
                again = np.isin(rows["queue_offset"], before["queue_offset"])
                rows = np.concatenate([rows[~again], before])
            self._rows[producer_group] = rows
            for holder, (offsets, until_ms) in self._held.items():
                given = ~np.isin(offsets, rows["queue_offset"])
                self._held[holder] = offsets[given], until_ms

    def take(
        self,
        now_ms: int,
        *,
        producer_group: str | None,
        topic_ids: Sequence[int] | None,
        limit: int,
        window: tuple[str, int] | None = None,
        holder: str = "",
    ) -> dict[str, Rows]:
        """Remove checks from the offers for a caller, and return them by producer group.

        Args:
            now_ms: checks that were due by then are skipped until the next sweep.
            producer_group: group of the producer that asks. None: a checker, which gets no check
                that a live producer of its group asks for.
            topic_ids: topics of the caller; None: all.
            limit: most rows.
            window: window of the run that asks.
            holder: caller that will call ``keep`` at once and while it works. It has finished with
                its earlier checks.
        """
        with self._lock:
            self._held.pop(holder, None)
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
            if holder and found:
                offsets = np.concatenate([rows["queue_offset"] for rows in found.values()])
                self._held[holder] = offsets, now_ms + _ON_ITS_WAY_MS
            return found

    def keep(self, holder: str, now_ms: int, *, offsets: Int64s | None = None) -> int:
        """Hold checks for another PRODUCER_LIVE_MS; return how many the holder has.

        Args:
            holder: has these checks and no others from now on.
            now_ms: current time.
            offsets: of open half messages; None: those of the holder's last ``take``. Waiting ones
                are no longer offered. Checks of another holder stay with that holder.
        """
        with self._lock:
            self._forget_silent(now_ms)
            held = self._held.pop(holder, None)
            others = self._held_offsets(now_ms)
            if offsets is None:
                offsets = held[0] if held is not None else others[:0]
            offsets = offsets[~np.isin(offsets, others)]
            if len(offsets):
                self._held[holder] = offsets, now_ms + limits.PRODUCER_LIVE_MS
                for name, rows in list(self._rows.items()):
                    self._keep(name, rows[~np.isin(rows["queue_offset"], offsets)])
            return len(offsets)

    def _held_offsets(self, now_ms: int) -> Int64s:
        """Return the offsets of the checks that live holders have."""
        self._forget_silent(now_ms)
        none = np.empty(0, dtype=np.int64)
        live = (offsets for offsets, until_ms in self._held.values() if until_ms > now_ms)
        return np.concatenate([none, *live])

    def _forget_silent(self, now_ms: int) -> None:
        """Drop holders whose hold ended more than PRODUCER_LIVE_MS ago."""
        since_ms = now_ms - limits.PRODUCER_LIVE_MS
        self._held = {name: held for name, held in self._held.items() if held[1] > since_ms}

    def waiting(self, now_ms: int, *, windows: Mapping[str, Window]) -> Int64s:
        """Return offsets of checks that are held, or that wait for a live caller.

        Args:
            now_ms: callers that asked within PRODUCER_LIVE_MS before are live.
            windows: so are runs whose window is live.
        """
        with self._lock:
            found = [self._held_offsets(now_ms)]
            for name, rows in self._rows.items():
                topic_ids = self._askers.topics(name, now_ms, windows=windows)
                if topic_ids:
                    found.append(rows["queue_offset"][_about(rows, topic_ids)])
        return np.concatenate(found)

    def forget(self, now_ms: int) -> None:
        """Drop the offers that have fallen due, after a sweep of all half messages that are due."""
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
            # Move the group to the end, so that small takes serve all groups in turn.
            del self._rows[name]
            if stays.any():
                self._rows[name] = rows[stays]
        return rows[wanted]


def _about(rows: Rows, topic_ids: Collection[int]) -> npt.NDArray[np.bool_]:
    if ALL in topic_ids:
        return np.ones(len(rows), dtype=np.bool_)
    return np.isin(rows["target_topic_id"], list(topic_ids))


#: No topic has this id; it stands for all topics.
ALL: Final = -1
#: Above this number of producer groups, or of topics in one, entries that are not live are dropped.
_MANY: Final = 1_000


@dataclass(frozen=True, slots=True)
class _Asked:
    """Time at which a topic was last asked about, and the caller's window."""

    at_ms: int
    window: tuple[str, int] | None

    def lately(self, now_ms: int) -> bool:
        return now_ms - self.at_ms < limits.PRODUCER_LIVE_MS

    def at_it(self, now_ms: int, *, windows: Mapping[str, Window]) -> bool:
        """Return True if the window of the caller is live, as it is while its checker works.

        The next epoch of the name counts as the same: it starts the check job before it asks.
        """
        if self.window is None:
            return False
        name, epoch = self.window
        newest = windows.get(name)
        return newest is not None and newest.expires_at_ms > now_ms and newest.epoch - epoch <= 1


class Askers:
    """Topics that producer groups ask about, and topics that any checker asks about."""

    def __init__(self) -> None:
        #: By producer group, None for callers that take checks of all groups. Then by topic and
        #: window name, None without a window, so that callers of different kinds do not overwrite
        #: each other.
        self._asked: dict[str | None, dict[tuple[int, str | None], _Asked]] = {None: {}}

    def note(
        self,
        producer_group: str | None,
        now_ms: int,
        *,
        topic_ids: Sequence[int] | None,
        window: tuple[str, int] | None,
    ) -> None:
        """Record that a caller asks about these topics for a producer group; None: all."""
        if len(self._asked) >= _MANY:
            live = [name for name in self._asked if name is None or self.claimed(name, now_ms)]
            self._asked = {name: self._asked[name] for name in live}
        asked = self._asked.setdefault(producer_group, {})
        if len(asked) >= _MANY:
            for gone in [each for each, last in asked.items() if not last.lately(now_ms)]:
                del asked[gone]
        about = (ALL,) if topic_ids is None else topic_ids
        name = window[0] if window is not None else None
        asked.update({(topic_id, name): _Asked(now_ms, window) for topic_id in about})

    def claimed(self, producer_group: str, now_ms: int) -> Collection[int]:
        """Return the topics that a live producer of the group asks about; ALL may be among them."""
        asked = self._asked.get(producer_group, {})
        return {topic_id for (topic_id, _), last in asked.items() if last.lately(now_ms)}

    def topics(
        self, producer_group: str, now_ms: int, *, windows: Mapping[str, Window]
    ) -> Collection[int]:
        """Return the topics of live callers that may take checks of this producer group."""
        return {
            topic_id
            for name in (producer_group, None)
            for (topic_id, _), last in self._asked.get(name, {}).items()
            if last.lately(now_ms) or last.at_it(now_ms, windows=windows)
        }
