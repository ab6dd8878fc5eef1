"""Facts of a consumer group: its rate limit, its sink version, its redriven dead letters."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.group import Group
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import Kind

#: Credit is counted in 1/1000 of a message, so a rate per second is the gain per millisecond.
_MESSAGE: Final = 1000
SINK_KINDS: Final = (Kind.SINK_FILE, Kind.SINK_REPLACED)
Flags = npt.NDArray[np.bool_]
_NONE: Flags = np.zeros(0, dtype=np.bool_)


@dataclass(slots=True)
class Pace:
    """Token bucket of one group: its credit at a time, and its rate.

    Capacity is the messages of one second, at least one message. In any time t the group gets at
    most rate × t + capacity messages.
    """

    rate_per_s: float
    at_ms: int
    credit: float

    @classmethod
    def full(cls, rate_per_s: float, at_ms: int) -> "Pace":
        """Return a full bucket."""
        pace = cls(rate_per_s, at_ms, 0.0)
        pace.credit = pace._room()
        return pace

    def _room(self) -> float:
        return max(1.0, self.rate_per_s) * _MESSAGE

    def _credit_at(self, now_ms: int) -> float:
        gained = max(0, now_ms - self.at_ms) * self.rate_per_s
        return min(self._room(), self.credit + gained)

    def allows(self, now_ms: int) -> int:
        """Return how many messages may be delivered now."""
        return int(self._credit_at(now_ms) // _MESSAGE)

    def next_ms(self, now_ms: int) -> int:
        """Return the time from which the next message may be delivered."""
        missing = _MESSAGE - self._credit_at(now_ms)
        return now_ms if missing <= 0 else now_ms + max(1, -int(-missing // self.rate_per_s))

    def spend(self, messages: int, now_ms: int) -> None:
        """Subtract delivered messages; clamp at 0, as a restart forgets earlier credit."""
        self.credit = max(0.0, self._credit_at(now_ms) - messages * _MESSAGE)
        self.at_ms = max(self.at_ms, now_ms)

    def alter(self, rate_per_s: float, now_ms: int) -> None:
        """Change the rate from now on."""
        self.credit = self._credit_at(now_ms)
        self.at_ms = max(self.at_ms, now_ms)
        self.rate_per_s = rate_per_s
        self.credit = min(self.credit, self._room())


class Paces:
    """Token buckets of all rate-limited groups, by group_id.

    The log determines them: group settings set the rate, and deliveries take credit. If the log
    does not reach back far enough, a bucket starts empty, so a restart allows no second burst.
    """

    def __init__(self) -> None:
        self._paces: dict[int, Pace] = {}

    def put(self, group: Group, now_ms: int) -> None:
        """Set the rate of a created or altered group."""
        known = self._paces.get(group.group_id)
        if group.max_rate_per_s is None:
            self._paces.pop(group.group_id, None)
        elif known is None:
            self._paces[group.group_id] = Pace.full(group.max_rate_per_s, now_ms)
        else:
            known.alter(group.max_rate_per_s, now_ms)

    def forget(self, group_id: int) -> None:
        """Drop the bucket of a deleted group."""
        self._paces.pop(group_id, None)

    def empty(self, now_ms: int) -> None:
        """Empty all buckets, because the earlier deliveries are unknown."""
        for pace in self._paces.values():
            pace.credit, pace.at_ms = 0.0, now_ms

    def of(self, group_id: int) -> Pace | None:
        """Return the group's bucket; None without a limit."""
        return self._paces.get(group_id)

    def delivered(self, group_id: int, messages: int, *, now_ms: int) -> None:
        """Take the credit of messages that the group leased."""
        pace = self._paces.get(group_id)
        if pace is not None:
            pace.spend(messages, now_ms)


class SinkVersion(NamedTuple):
    """Version of a sink, the set of files that count."""

    #: Number of all settles with files and all replacements; 0: none yet.
    version: int = 0
    #: Version of its last replacement. Only a replacement makes files stop counting.
    replaced: int = 0


@dataclass(slots=True)
class SinkVersions:
    """Sink versions of all groups."""

    _of: dict[int, SinkVersion] = field(default_factory=dict)

    def of(self, group_id: int) -> SinkVersion:
        """Return the version of a group's sink."""
        return self._of.get(group_id, SinkVersion())

    def load(self, group_id: int, *, version: int, replaced: int) -> None:
        """Set the version that the state tables hold."""
        self._of[group_id] = SinkVersion(version, replaced)

    def apply(self, events: EventRows) -> None:
        """Set the version that a settle with files, or a replacement, has made."""
        version = int(events.column("delivery", np.int64).max())
        replaced = version if events.kind == Kind.SINK_REPLACED else self.of(events.group_id)[1]
        self._of[events.group_id] = SinkVersion(version, replaced)

    def forget(self, group_ids: Iterable[int]) -> None:
        """Drop the versions of deleted groups."""
        for group_id in group_ids:
            self._of.pop(group_id, None)


class Redriven:
    """Set of dead letters that a redrive has made available again.

    A redrive takes each once; a second failure of the message makes a new dead letter.
    """

    def __init__(self) -> None:
        self._flags: dict[tuple[int, int], Flags] = {}

    def has(self, topic_id: int, queue_id: int, *, offsets: Int64s) -> Flags:
        """Return the mask of these offsets that are in the set."""
        flags = self._flags.get((topic_id, queue_id), _NONE)
        known = offsets < len(flags)
        found = np.zeros(len(offsets), dtype=np.bool_)
        found[known] = flags[offsets[known]]
        return found

    def add(self, topic_id: int, queue_id: int, *, offsets: Int64s) -> None:
        """Add these dead letters."""
        if not len(offsets):
            return
        key = (topic_id, queue_id)
        flags = self._flags.get(key, _NONE)
        stop = int(offsets.max()) + 1
        if stop > len(flags):
            grown = np.zeros(max(stop, 2 * len(flags)), dtype=np.bool_)
            grown[: len(flags)] = flags
            flags = self._flags[key] = grown
        flags[offsets] = True

    def count(self, topic_id: int, queue_id: int, *, start: int) -> int:
        """Return how many offsets of a queue from ``start`` on are in the set."""
        return int(np.count_nonzero(self._flags.get((topic_id, queue_id), _NONE)[start:]))

    def load(self, table: pa.Table) -> None:
        """Add the rows of the state tables: topic_id, queue_id, queue_offset."""
        topics, queues, offsets = (
            table.column(name).to_numpy() for name in ("topic_id", "queue_id", "queue_offset")
        )
        for topic_id in np.unique(topics):
            for queue_id in np.unique(queues[topics == topic_id]):
                mine = (topics == topic_id) & (queues == queue_id)
                self.add(int(topic_id), int(queue_id), offsets=offsets[mine])
