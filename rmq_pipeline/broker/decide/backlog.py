"""Requests that read what consumer groups have not settled, for metrics; they store nothing.

The writer decides them, because only its threads may read the state of consumer groups. Each looks
at a part of the queues, so that no send waits long for one. Measured by benchmarks/metrics.py: 6 µs
for a queue without deliveries under way, 14 µs for one with some.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.consumption import Consumption
from rmq_pipeline.broker.state.lease_table import AHEAD, EXHAUSTED, HELD, PARKED, WAITING
from rmq_pipeline.broker.state.state import Queue, State

#: Queues and deliveries of one request at most; it holds the writer 1 to 2 ms.
QUEUES: Final = 128
_DELIVERIES: Final = 100_000
#: Stands for the number of a receipt.
_LEASED: Final = WAITING + 1
Key = tuple[int, int, int]


@dataclass(slots=True)
class Unsettled:
    """What one group has not settled of the queues of one topic."""

    #: Messages after the cursors; those behind a cursor that were never delivered.
    unread: int = 0
    waiting: int = 0
    in_flight: int = 0
    retrying: int = 0
    parked: int = 0
    #: Deliveries that have ended and may be repeated now.
    due: int = 0
    quarantined: int = 0
    #: When the oldest unsettled, and the oldest undelivered message was stored; None: no message.
    oldest_ms: int | None = None
    oldest_unread_ms: int | None = None
    #: (queue_id, queue_offset) of oldest messages whose times are not in memory: unsettled, unread.
    #: Empty once times of them were looked up: the times above are the oldest that are known.
    unknown: list[tuple[int, int]] = field(default_factory=list)
    unknown_unread: list[tuple[int, int]] = field(default_factory=list)

    def lag(self) -> int:
        """Return the number of messages that are not settled."""
        return self.unread + self.waiting + self.in_flight + self.retrying + self.parked

    def add(self, queue: Queue, found: Consumption, *, queue_id: int, now_ms: int) -> None:
        """Add a queue."""
        cursor = max(found.cursor, queue.min_offset)
        unread = queue.max_offset - cursor
        self.unread += max(0, unread)
        waiting = found.waiting()
        self.waiting += waiting
        self.quarantined += len(found.quarantined)
        if unread > 0:
            self._age(queue, (queue_id, cursor), is_unread=True)
        if len(found.leases):
            self._add_deliveries(found, now_ms=now_ms)
        if unread > 0 or waiting or len(found.leases):
            oldest = max(found.committed_offset(), queue.min_offset)
            if oldest < queue.max_offset:
                self._age(queue, (queue_id, oldest), is_unread=False)

    def _add_deliveries(self, found: Consumption, *, now_ms: int) -> None:
        leases = found.leases
        # One pass: a number for each state, and one for all receipts.
        states = np.minimum(leases.delivery[leases.alive], _LEASED) - AHEAD
        counts = np.bincount(states, minlength=_LEASED - AHEAD + 1).tolist()
        self.in_flight += counts[_LEASED - AHEAD]
        self.parked += counts[PARKED - AHEAD] + counts[HELD - AHEAD]
        self.retrying += counts[WAITING - AHEAD] + counts[EXHAUSTED - AHEAD]
        if leases.next_visible <= now_ms:
            open_rows = leases.alive & (leases.delivery >= WAITING)
            self.due += int(np.count_nonzero(open_rows & (leases.visible_at <= now_ms)))

    def _age(self, queue: Queue, place: tuple[int, int], *, is_unread: bool) -> None:
        at_ms = queue.times.at(place[1])
        if at_ms is None:
            (self.unknown_unread if is_unread else self.unknown).append(place)
        elif is_unread:
            self.oldest_unread_ms = min(at_ms, self.oldest_unread_ms or at_ms)
        else:
            self.oldest_ms = min(at_ms, self.oldest_ms or at_ms)


@dataclass(frozen=True, slots=True)
class Held:
    """What the state holds besides the queues, and the keys of all (group, topic, queue)."""

    now_ms: int
    keys: tuple[Key, ...]
    scheduled: int
    #: Time for which the first scheduled message has been due; 0: none is due.
    overdue_ms: int
    halves: int
    #: By topic_id of dead letters: those that are kept and were not redriven.
    dead_letters: dict[int, int]


@dataclass(frozen=True, slots=True)
class Overview(Request):
    """Query of the parts of ``Held``."""

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return ``Held`` as the answer."""
        due_ms = state.schedule.next_due_ms(ahead_ms=state.ahead_ms)
        letters: dict[int, int] = {}
        for topic_id in {group.dead_letter_topic_id for group in state.groups.values()}:
            if (topic := state.topics.get(topic_id)) is not None:
                letters[topic_id] = sum(
                    queue.max_offset
                    - queue.min_offset
                    - state.redriven.count(topic_id, queue_id, start=queue.min_offset)
                    for queue_id, queue in enumerate(topic.queues)
                )
        return Decision(
            Held(
                now_ms,
                tuple(state.consumptions),
                len(state.schedule),
                max(0, now_ms - due_ms) if due_ms is not None else 0,
                len(state.halves),
                letters,
            )
        )


@dataclass(frozen=True, slots=True)
class Count(Request):
    """Query that adds queues to ``into``, from ``keys[start]`` on; the answer is where to go on.

    ``into`` is read only after the answer, so the caller and the writer never touch it at once.
    """

    keys: Sequence[Key]
    start: int
    #: By group_id and topic_id.
    into: dict[tuple[int, int], Unsettled]

    def decide(self, state: State, now_ms: int) -> Decision:
        """Read some queues."""
        at, deliveries = self.start, 0
        stop = min(len(self.keys), self.start + QUEUES)
        while at < stop and deliveries < _DELIVERIES:
            group_id, topic_id, queue_id = key = self.keys[at]
            at += 1
            found, topic = state.consumptions.get(key), state.topics.get(topic_id)
            if found is None or topic is None:  # deleted meanwhile
                continue
            unsettled = self.into.setdefault((group_id, topic_id), Unsettled())
            queue = topic.queues[queue_id]
            unsettled.add(queue, found, queue_id=queue_id, now_ms=now_ms)
            deliveries += len(found.leases)
        return Decision(at)
