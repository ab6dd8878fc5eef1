"""Finding messages that repeat one the topic has stored within its window."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.broker.state.placed import Placed
from rmq_pipeline.broker.state.schedule import keys_of
from rmq_pipeline.message import Int32s, Int64s, hash64
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID, Deduplicate, Topic

Mask = npt.NDArray[np.bool_]

#: Two runs are merged if the younger has at least 1/4 of the older one's rows.
_MERGE_SHARE: Final = 4
#: Two runs with no more rows than this together are always merged.
_SMALL_RUN: Final = 1024
#: Bit set in ``place`` of a message in SCHEDULE_TOPIC_XXXX.
_SCHEDULED: Final = np.int64(1) << np.int64(62)
_OFFSET: Final = (np.int64(1) << np.int64(48)) - np.int64(1)
_QUEUE: Final = np.int64(0x3FFF)


def identities(deduplicate: Deduplicate, message_id: pa.Array, *, keys: pa.Array) -> Int64s | None:
    """Return the identity of each message, 0 for one that repeats none.

    The result is None if the topic stores every message.
    """
    if deduplicate == "none":
        return None
    if deduplicate == "message_id":
        return hash64(message_id)
    joined = pc.binary_join(keys, " ")
    return hash64(pc.if_else(pc.equal(joined, ""), pa.scalar(None, pa.string()), joined))


@dataclass(frozen=True, slots=True)
class Known:
    """Stored messages, one row each."""

    identity: Int64s
    stored_at: Int64s
    #: Queue and offset, with a bit for SCHEDULE_TOPIC_XXXX.
    place: Int64s
    #: Time at which the last of them was stored.
    newest: int

    def __len__(self) -> int:
        return len(self.identity)

    def take(self, rows: npt.NDArray[np.intp] | Mask) -> "Known":
        """Return the messages of these rows."""
        return Known(
            self.identity[rows], self.stored_at[rows], self.place[rows], newest=self.newest
        )

    def queue_id(self) -> Int32s:
        """Return the queue of each message."""
        return ((self.place >> np.int64(48)) & _QUEUE).astype(np.int32)

    def scheduled(self) -> Mask:
        """Return True for each message in SCHEDULE_TOPIC_XXXX."""
        marked: Mask = (self.place & _SCHEDULED) != 0
        return marked

    def queue_offset(self) -> Int64s:
        """Return the offset of each message."""
        offsets: Int64s = self.place & _OFFSET
        return offsets


def places(queue_id: Int32s, queue_offset: Int64s, *, scheduled: bool | Mask) -> Int64s:
    """Return queue and offset as one number."""
    marked: Int64s = keys_of(queue_id, queue_offset) | np.where(scheduled, _SCHEDULED, np.int64(0))
    return marked


def _joined(parts: list[Known]) -> Known:
    return Known(
        np.concatenate([part.identity for part in parts]),
        np.concatenate([part.stored_at for part in parts]),
        np.concatenate([part.place for part in parts]),
        newest=parts[-1].newest,
    )


class Repetitions:
    """Stored messages of one topic that a new one may repeat: those in the window, and a few older.

    They are runs sorted by identity. Stored messages become a new run, which is merged with the run
    before it once it has about the same size. Messages that have left the window are dropped at the
    next merge; a run is dropped when all its messages have left.
    """

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._runs: list[Known] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    @property
    def deduplicate(self) -> Deduplicate:
        """Property that makes two messages repetitions in this topic."""
        return self._topic.deduplicate

    def put(self, topic: Topic) -> None:
        """Apply the altered topic."""
        if topic.deduplicate != self._topic.deduplicate:
            self._runs = []
        self._topic = topic

    def add(self, known: Known) -> None:
        """Add messages stored after all others; none of them repeats another."""
        known = known.take(known.identity != 0)
        if not len(known):
            return
        known = known.take(np.argsort(known.identity, kind="stable"))
        since = self._since(known.newest)
        self._runs = [run for run in self._runs if run.newest > since]
        self._runs.append(known)
        while len(self._runs) > 1 and _alike(*self._runs[-2:]):
            younger, older = self._runs.pop(), self._runs.pop()
            both = _joined([older, younger])
            both = both.take(both.stored_at > since)
            self._runs.append(both.take(np.argsort(both.identity, kind="stable")))

    def _since(self, now_ms: int) -> int:
        """Return the time up to which stored messages no longer count."""
        return max(now_ms - self._topic.deduplicate_window_ms, self._topic.deduplicate_since_ms - 1)

    def find(self, identity: Int64s, now_ms: int) -> tuple[Mask, Known]:
        """Return the mask of repeated messages in the window, and the stored rows."""
        found = np.zeros(len(identity), dtype=np.bool_)
        place = np.zeros(len(identity), dtype=np.int64)
        stored_at = np.zeros(len(identity), dtype=np.int64)
        since = self._since(now_ms)
        for run in self._runs:
            # The last of equal ones is the youngest; the older ones leave the window before it.
            at = np.searchsorted(run.identity, identity, side="right") - 1
            here = (at >= 0) & (run.identity[at] == identity) & (run.stored_at[at] > since)
            found |= here
            place[here], stored_at[here] = run.place[at[here]], run.stored_at[at[here]]
        found &= identity != 0
        return found, Known(identity, stored_at, place, newest=now_ms)

    def forget(self, place: Int64s) -> None:
        """Drop recalled messages: a message that is sent again repeats none of them."""
        self._runs = [run.take(~np.isin(run.place, place)) for run in self._runs]
        self._runs = [run for run in self._runs if len(run)]


def _alike(older: Known, younger: Known) -> bool:
    small = len(older) + len(younger) <= _SMALL_RUN
    return small or len(younger) * _MERGE_SHARE >= len(older)


class Duplicates:
    """Repetitions of all topics that suppress them."""

    def __init__(self) -> None:
        self._topics: dict[int, Repetitions] = {}

    def of(self, topic_id: int) -> Repetitions | None:
        """Return the repetitions of a topic; None if it stores each message."""
        return self._topics.get(topic_id)

    def put(self, topic: Topic) -> None:
        """Apply a created or altered topic."""
        known = self._topics.get(topic.topic_id)
        if topic.deduplicate == "none":
            self._topics.pop(topic.topic_id, None)
        elif known is None:
            self._topics[topic.topic_id] = Repetitions(topic)
        else:
            known.put(topic)

    def drop(self, topic_id: int) -> None:
        """Drop a deleted topic."""
        self._topics.pop(topic_id, None)

    def learn(self, placed: Placed) -> None:
        """Add stored messages."""
        if not self._topics:
            return
        if placed.topic_id != SCHEDULE_TOPIC_ID:
            topic = self._topics.get(placed.topic_id)
            if topic is not None:
                # A delivered scheduled message was stored, and added, when it was scheduled.
                new = pc.is_null(placed.batch.column("deliver_at_ms"))
                self._learn(placed, topic, rows=new.to_numpy(zero_copy_only=False))
            return
        target = placed.batch.column("target_topic_id").to_numpy()
        for topic_id in set(np.unique(target).tolist()) & set(self._topics):
            self._learn(placed, self._topics[topic_id], rows=target == topic_id)

    def _learn(self, placed: Placed, topic: Repetitions, *, rows: Mask) -> None:
        at = np.flatnonzero(rows)
        if not len(at):
            return
        identity = placed.identity
        if identity is None:  # read from the log
            batch = placed.batch
            identity = identities(
                topic.deduplicate, batch.column("message_id"), keys=batch.column("keys")
            )
            assert identity is not None
        scheduled = placed.topic_id == SCHEDULE_TOPIC_ID
        place = places(placed.queue_id[at], placed.queue_offset[at], scheduled=scheduled)
        stored_at = np.full(len(at), placed.stored_at_ms, dtype=np.int64)
        topic.add(Known(identity[at], stored_at, place, newest=placed.stored_at_ms))

    def load(self, topic_id: int, rows: pa.Table) -> None:
        """Load the messages stored within the window, oldest first."""
        topic = self._topics.get(topic_id)
        if topic is None or not rows.num_rows:
            return
        rows = rows.combine_chunks()
        ids, keys = (rows.column(name).chunk(0) for name in ("message_id", "keys"))
        identity = identities(topic.deduplicate, ids, keys=keys)
        assert identity is not None
        place = places(
            rows.column("queue_id").to_numpy(),
            rows.column("queue_offset").to_numpy(),
            scheduled=rows.column("scheduled").to_numpy(),
        )
        stored_at = rows.column("stored_at_ms").to_numpy()
        topic.add(Known(identity, stored_at, place, newest=int(stored_at[-1])))

    def recalled(self, queue_id: int, queue_offset: Int64s) -> None:
        """Drop recalled scheduled messages."""
        place = places(np.full(len(queue_offset), queue_id, np.int32), queue_offset, scheduled=True)
        for topic in self._topics.values():
            topic.forget(place)
