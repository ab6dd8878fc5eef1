"""Requests of the check job: count checks, end exhausted half messages, delay unreadable ones."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from rmq_pipeline.broker.decide.publish import Send, place
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.decide.transaction import Mask, end_events, producers
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.halves import Rows
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import Kind
from rmq_pipeline.topic import HALF_TOPIC_ID

#: Delay of the next try for exhausted half messages that cannot be read.
_AGAIN_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class Swept:
    """Result of one sweep."""

    #: Half messages to offer for a check, and the mask of each producer group.
    asked: Rows
    producers: dict[str, Mask]
    #: Half messages without a check left, and the mask of each producer group.
    exhausted: Rows
    exhausted_of: dict[str, Mask]
    #: Number rolled back because their topic was deleted.
    dropped: int
    next_due_ms: int | None
    #: Time of the sweep; and True if nothing more was due at that time.
    at_ms: int
    is_all: bool

    def __len__(self) -> int:
        return len(self.asked) + len(self.exhausted) + self.dropped


@dataclass(frozen=True, slots=True)
class Sweep(Request):
    """Request that counts the checks that are due.

    A check that still waits to be fetched is offered again but not counted, because its callers are
    merely busy. Its new time is stored all the same.
    """

    limit: int
    check_max: int
    interval_ms: int
    window: tuple[str, int] | None
    #: Offsets of the checks that still wait; some of them may be due.
    waiting: Int64s

    def decide(self, state: State, now_ms: int) -> Decision:
        """Count the checks that are due; the answer is Swept."""
        state.fence(self.window)
        halves = state.halves
        rows = halves.due(now_ms, self.limit)
        there = np.isin(rows["target_topic_id"], list(state.topics))
        waits = np.isin(rows["queue_offset"], self.waiting)
        left = waits | (rows["checks"] < self.check_max)
        gone, exhausted, asked = rows[~there], rows[there & ~left], rows[there & left]
        asked["checks"] += ~waits[there & left]
        asked["due_ms"] = now_ms + self.interval_ms
        of_producer = producers(halves, asked)
        events = [
            _half_event(asked[mask], name, now_ms=now_ms) for name, mask in of_producer.items()
        ]
        events += end_events(state, Kind.HALF_ROLLED_BACK, rows=gone, now_ms=now_ms)
        answer = Swept(
            asked=asked,
            producers=of_producer,
            exhausted=exhausted,
            exhausted_of=producers(halves, exhausted),
            dropped=len(gone),
            next_due_ms=halves.next_due_ms(),
            at_ms=now_ms,
            is_all=len(rows) < self.limit,
        )
        return Decision(answer, events=events)


def _half_event(rows: Rows, producer_group: str, *, now_ms: int) -> EventRows:
    return EventRows(
        kind=Kind.HALF,
        at_ms=now_ms,
        topic_id=HALF_TOPIC_ID,
        queue_id=0,
        queue_offset=rows["queue_offset"],
        attempt=rows["checks"],
        visible_at_ms=rows["due_ms"],
        delivery=rows["immunity_ms"],
        message_group_hash=rows["message_id_hash"],
        client_id=producer_group,
    )


@dataclass(frozen=True, slots=True)
class GiveUp(Request):
    """Request that moves exhausted half messages to TRANS_CHECK_MAX_TIME_TOPIC, in one step."""

    rows: Rows
    copies: Send

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store all or nothing; the answer is the number stored, 0 if one was ended meanwhile."""
        # Use the current rows: after a rebuild other codes stand for producer groups.
        rows, still = state.halves.find(self.rows["queue_offset"], self.rows["message_id_hash"])
        if not still.all():
            return Decision(0)
        placed, _ = place(self.copies, state, now_ms=now_ms, heads={})
        events = end_events(state, Kind.HALF_GIVEN_UP, rows=rows, now_ms=now_ms)
        return Decision(len(self.rows), placed=placed, events=events)


@dataclass(frozen=True, slots=True)
class PutOff(Request):
    """Request that delays exhausted half messages that cannot be read; nothing is stored."""

    queue_offset: Int64s

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the number of messages delayed for the first time as the answer."""

        def put_off(state: State) -> None:
            state.halves.put_off(self.queue_offset, until_ms=now_ms + _AGAIN_MS)

        return Decision(state.halves.not_put_off(self.queue_offset), unlogged=[put_off])
