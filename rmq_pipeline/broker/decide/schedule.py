"""Requests that deliver, delay and recall scheduled messages."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.decide.publish import Send, place, subset
from rmq_pipeline.broker.decide.queues import Heads
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.placed import Placed
from rmq_pipeline.broker.state.schedule import Mask, Scheduled
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.errors import RecallError
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import Kind
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID

#: Bounds of the delay of unreadable messages. The delay is their lateness so far.
_SOON_MS: Final = 10_000
_AGAIN_MS: Final = 60_000
#: Interval of looks at the wall clock while the broker's time is ahead of it.
_LOOK_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class FindDue(Request):
    """Query for due scheduled messages."""

    limit: int
    window: tuple[str, int] | None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return (rows, when the next one is due) as the answer; store nothing."""
        state.fence(self.window)
        rows = state.schedule.due(now_ms, self.limit, ahead_ms=state.ahead_ms)
        next_due_ms = state.schedule.next_due_ms(ahead_ms=state.ahead_ms)
        if state.ahead_ms and next_due_ms is not None:  # the wall clock may be set meanwhile
            next_due_ms = min(next_due_ms, now_ms + _LOOK_MS)
        return Decision((rows, next_due_ms))


@dataclass(frozen=True, slots=True)
class Deliver(Request):
    """Request that copies due messages to their topics and ends their wait, in one step."""

    rows: Scheduled
    #: For each target topic its rows, and the send of their copies.
    sends: tuple[tuple[Int64s, Send], ...]
    window: tuple[str, int] | None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Deliver the rows that still wait.

        The answer is (rows delivered, number dropped, lateness in ms).
        """
        state.fence(self.window)
        still = state.schedule.open(self.rows.keys())
        delivered = np.zeros(len(self.rows), dtype=np.bool_)
        placed: list[Placed] = []
        heads: Heads = {}
        for at, send in self.sends:
            open_rows = still[at]
            if send.topic_id not in state.topics or not open_rows.any():
                continue
            chosen = send if open_rows.all() else subset(send, np.flatnonzero(open_rows))
            placed.extend(place(chosen, state, now_ms=now_ms, heads=heads)[0])
            delivered[at[open_rows]] = True
        dropped = still & ~delivered
        events = [
            *ended_events(Kind.SCHEDULE_DELIVERED, self.rows.take(delivered), now_ms=now_ms),
            *ended_events(Kind.SCHEDULE_DROPPED, self.rows.take(dropped), now_ms=now_ms),
        ]
        lateness = now_ms - self.rows.deliver_at[delivered]
        answer = (self.rows.take(delivered), int(dropped.sum()), lateness)
        return Decision(answer, placed=placed, events=events)


@dataclass(frozen=True, slots=True)
class PutOff(Request):
    """Request that delays due messages that cannot be read; nothing is stored."""

    rows: Scheduled
    #: Rows that failed when read alone. The others are retried earlier, so that each is tried at
    #: last.
    alone: Mask
    window: tuple[str, int] | None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return the number of messages delayed for the first time as the answer."""
        state.fence(self.window)
        # One delay for all, so that they are delivered in order once they are readable.
        pause = min(max(now_ms - int(self.rows.deliver_at.min()), _SOON_MS), _AGAIN_MS)
        until_ms = now_ms + np.where(self.alone, pause, pause // 2)
        keys = self.rows.keys()

        def put_off(state: State) -> None:
            state.schedule.put_off(keys, until_ms=until_ms, alone=self.alone)

        return Decision(state.schedule.not_put_off(keys), unlogged=[put_off])


def ended_events(kind: Kind, rows: Scheduled, *, now_ms: int) -> list[EventRows]:
    """Build the events that end the wait of these rows."""
    return [
        EventRows(
            kind=kind,
            at_ms=now_ms,
            topic_id=SCHEDULE_TOPIC_ID,
            queue_id=queue_id,
            queue_offset=rows.queue_offset[rows.queue_id == queue_id],
            visible_at_ms=rows.deliver_at[rows.queue_id == queue_id],
        )
        for queue_id in np.unique(rows.queue_id).tolist()
    ]


@dataclass(frozen=True, slots=True)
class FindScheduled(Request):
    """Query for the messages at these places that still wait."""

    keys: Int64s

    def decide(self, state: State, now_ms: int) -> Decision:
        """Return (rows, mask of the places) as the answer; store nothing."""
        return Decision(state.schedule.find(self.keys))


@dataclass(frozen=True, slots=True)
class Recall(Request):
    """Request that ends the wait of recalled messages."""

    rows: Scheduled

    def decide(self, state: State, now_ms: int) -> Decision:
        """Recall all of them, or none if one no longer waits."""
        refuse_recall(~state.schedule.open(self.rows.keys()))
        return Decision(events=ended_events(Kind.SCHEDULE_RECALLED, self.rows, now_ms=now_ms))


def refuse_recall(
    wrong: npt.NDArray[np.bool_],
    *,
    what: str = "the message was delivered or recalled before",
    remedy: str = "No message was recalled. Correct a delivered message by sending another one.",
) -> None:
    """Raise RecallError for the first wrong row."""
    if wrong.any():
        row = int(np.argmax(wrong))
        raise RecallError(f"Row {row} cannot be recalled: {what}.", remedy=remedy)
