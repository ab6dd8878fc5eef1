"""Counters of a broker: what its frames stored, what its endpoints did.

A frame is counted after its answers have left, in the thread that wrote it: once per batch and
event run, with no look at a message. The lock is held for a few additions to dictionaries, and by a
scrape for a copy of them. Counters begin at 0 with each start of the broker.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.broker.decide.request import Decision
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.placed import Placed
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.metrics.declared import Histogram, Samples
from rmq_pipeline.store.events import Kind
from rmq_pipeline.topic import HALF_TOPIC_ID, SCHEDULE_TOPIC_ID

#: Kinds of events beside which the messages of a decision are copies of stored messages.
_COPIES: Final = frozenset(
    {Kind.DEAD_LETTER, Kind.SCHEDULE_DELIVERED, Kind.HALF_COMMITTED, Kind.HALF_GIVEN_UP}
)
#: Kinds of events that are counted, and the outcome of a delivery that each tells.
OUTCOMES: Final = {
    Kind.ACK: "ack",
    Kind.RETRY: "retry",
    Kind.EXPIRE: "expire",
    Kind.RELEASE: "release",
    Kind.PARK: "park",
    Kind.DEAD_LETTER: "dead_letter",
}
_COUNTED: Final = frozenset(
    {
        *OUTCOMES,
        Kind.LEASE,
        Kind.SCHEDULE_DELIVERED,
        Kind.HALF_COMMITTED,
        Kind.HALF_ROLLED_BACK,
    }
)
#: Message types that follow from the topic that holds the messages for their target.
_AIMED: Final = {SCHEDULE_TOPIC_ID: "delay", HALF_TOPIC_ID: "transaction"}
#: By its index a column is found twice as fast as by its name.
_BODY: Final = schema.MESSAGE.get_field_index("body")
#: Counters of deleted topics and groups are dropped once more than one in this many of the others
#: was deleted: a broker of thousands does not look at all its counters at each deletion.
_DELETED_SHARE: Final = 16
#: Consumer group and topic, by name.
Pair = tuple[str, str]


def body_bytes(bodies: pa.Array | pa.ChunkedArray) -> int:
    """Return the bytes of a column of bodies, from its offsets: no body is looked at."""
    if isinstance(bodies, pa.ChunkedArray):
        return sum(map(body_bytes, bodies.chunks))
    if not len(bodies):
        return 0
    # Arrow may pad the buffer, by any number of bytes.
    end = bodies.offset + len(bodies)
    offsets = np.frombuffer(bodies.buffers()[1], np.int32, count=end + 1)
    return int(offsets[end] - offsets[bodies.offset])


@dataclass(slots=True)
class Counts:
    """Counters at one time."""

    #: By topic_id and message type ("": that of the topic): messages, and bytes of their bodies.
    sent: Counter[tuple[int, str]] = field(default_factory=Counter)
    sent_bytes: Counter[tuple[int, str]] = field(default_factory=Counter)
    #: Events by kind, group_id and topic_id.
    events: Counter[tuple[Kind, int, int]] = field(default_factory=Counter)
    #: By consumer group and topic: messages read without a lease, and bytes of delivered bodies.
    pulled: Counter[Pair] = field(default_factory=Counter)
    read_bytes: Counter[Pair] = field(default_factory=Counter)
    #: Upkeep jobs that the broker did itself.
    fallbacks: Counter[str] = field(default_factory=Counter)
    #: By endpoint, verb and outcome.
    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    durations: dict[tuple[str, str], Histogram] = field(default_factory=dict)

    def copy(self) -> "Counts":
        """Return a copy that does not change."""
        return Counts(
            self.sent.copy(),
            self.sent_bytes.copy(),
            self.events.copy(),
            self.pulled.copy(),
            self.read_bytes.copy(),
            self.fallbacks.copy(),
            self.calls.copy(),
            {key: found.copy() for key, found in self.durations.items()},
        )

    def forget(self, state: State) -> None:
        """Drop the counters of deleted topics and groups; their ids are not used again."""
        for by_topic in (self.sent, self.sent_bytes):
            for key in [key for key in by_topic if key[0] not in state.topics]:
                del by_topic[key]
        for event in list(self.events):
            if (event[1] and event[1] not in state.groups) or (
                event[2] and event[2] not in state.topics
            ):
                del self.events[event]
        for by_name in (self.pulled, self.read_bytes):
            for pair in list(by_name):
                is_group = not pair[0] or pair[0] in state.group_ids
                if not is_group or pair[1] not in state.topic_ids:
                    del by_name[pair]


class Meter:
    """Counters of one open broker; safe for all threads."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self._lock = threading.Lock()
        self._counts = Counts()
        #: Topics and groups deleted since their counters were last dropped.
        self._deleted = 0
        #: Durations of frame writes; one thread at a time writes.
        self.frames = Histogram()
        self.written_bytes = 0
        #: Functions of the endpoints that add samples of their own.
        self.sources: list[Callable[[Samples], None]] = []

    def wrote(self, seconds: float, size: int) -> None:
        """Count a frame written to the commit log. Called in the frame's turn to write."""
        self.frames.observe(seconds)
        self.written_bytes += size

    def committed(self, decisions: Iterable[Decision]) -> None:
        """Count what a stored frame contains."""
        counts = self._counts
        with self._lock:
            for decision in decisions:
                is_copy = False
                for events in decision.events:
                    is_copy |= events.kind in _COPIES
                    if events.kind in _COUNTED:
                        key = (events.kind, events.group_id, events.topic_id)
                        counts.events[key] += len(events.queue_offset)
                    elif events.kind == Kind.UPKEEP_FALLBACK:
                        counts.fallbacks[_job_of(events)] += 1
                if not is_copy:
                    for placed in decision.placed:
                        self._sent(placed)

    def _sent(self, placed: Placed) -> None:
        counts, rows = self._counts, len(placed.queue_id)
        size = body_bytes(placed.batch.column(_BODY))
        kind = _AIMED.get(placed.topic_id)
        if kind is None:
            counts.sent[placed.topic_id, ""] += rows
            counts.sent_bytes[placed.topic_id, ""] += size
            return
        targets = placed.batch.column("target_topic_id").to_numpy()
        if (targets == targets[0]).all():  # a send names one topic
            counts.sent[int(targets[0]), kind] += rows
            counts.sent_bytes[int(targets[0]), kind] += size
            return
        for target in np.unique(targets).tolist():
            mine = placed.batch.filter(pa.array(targets == target))
            counts.sent[target, kind] += mine.num_rows
            counts.sent_bytes[target, kind] += body_bytes(mine.column("body"))

    def delivered(
        self, group: str, topic: str, *, size: int | pa.ChunkedArray, pulled: int = 0
    ) -> None:
        """Count bytes of bodies that a consumer got, and messages that it pulled without a lease.

        Args:
            group: its name; empty for a pull at the Flight endpoint, which names no group, and
                for a group that does not exist.
            topic: topic of the messages.
            size: bytes of their bodies, or the column of the bodies.
            pulled: number of pulled messages.
        """
        read = size if isinstance(size, int) else body_bytes(size)
        with self._lock:
            self._counts.read_bytes[group, topic] += read
            if pulled:
                self._counts.pulled[group, topic] += pulled

    def called(self, endpoint: str, verb: str, *, began: float, error: Exception | None) -> None:
        """Count a call of an endpoint.

        Args:
            endpoint: flight or grpc.
            verb: name of the verb or the RPC, as it is declared.
            began: ``time.perf_counter`` when the call was read.
            error: None if the call succeeded.
        """
        seconds = time.perf_counter() - began
        outcome = "ok" if error is None else type(error).__name__
        counts = self._counts
        with self._lock:
            counts.calls[endpoint, verb, outcome] += 1
            durations = counts.durations.get((endpoint, verb))
            if durations is None:
                durations = counts.durations[endpoint, verb] = Histogram()
            durations.observe(seconds)

    def deleted(self, state: State, n: int) -> None:
        """Drop the counters of deleted topics and groups, unless few of many were deleted.

        Args:
            state: without them.
            n: number of deletions since the last call.
        """
        with self._lock:
            self._deleted += n
            if self._deleted * _DELETED_SHARE > len(state.topics) + len(state.groups):
                self._deleted = 0
                self._counts.forget(state)

    def counts(self, state: State) -> Counts:
        """Return a copy of the counters, without those of deleted topics and groups."""
        with self._lock:
            self._counts.forget(state)
            return self._counts.copy()


def _job_of(events: EventRows) -> str:
    return str(json.loads(events.detail_of(0)).get("job", ""))
