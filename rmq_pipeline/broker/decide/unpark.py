"""Unpark: retry or skip messages that failed permanently, and deliver the messages behind them."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.state.consumption import Consumption, QueueKey
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.lease_table import EXHAUSTED, HELD, PARKED, WAITING
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.events import Kind


@dataclass(slots=True)
class Unparked:
    """Answer of unpark: messages retried and skipped, and quarantines lifted."""

    unparked: int = 0
    skipped: int = 0
    lifted: int = 0
    #: Queues with messages that must now be copied to the dead letters.
    exhausted: list[QueueKey] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Unpark(Request):
    """Request that retries or skips parked messages and lifts quarantines."""

    group: str
    topic: str | None
    #: Hashes of the message groups; None: all, and messages without a group.
    message_groups: Int64s | None
    skip: bool

    def decide(self, state: State, now_ms: int) -> Decision:
        """Reset the attempts of parked messages; release the held messages behind them."""
        group_id = state.group(self.group).group_id
        topic_id = None if self.topic is None else state.topic(self.topic).topic.topic_id
        decision = Decision(Unparked())
        for key, consumption in state.consumptions.items():
            if key[0] == group_id and topic_id in (None, key[1]):
                queue = QueueKey._make(key)
                events = self._of_queue(consumption, decision.answer, key=queue, now_ms=now_ms)
                decision.events.extend(queue.events(events, now_ms))
        return decision

    def _of_queue(
        self, consumption: Consumption, answer: Unparked, *, key: QueueKey, now_ms: int
    ) -> list[EventRows]:
        leases = consumption.leases
        rows = leases.parked()
        rows = rows[self._meant(leases.group[rows])]
        failed = rows[leases.delivery[rows] == PARKED]
        events = []
        for chosen, kind, delivery in (
            (failed, *((Kind.EXPIRE, EXHAUSTED) if self.skip else (Kind.RELEASE, WAITING))),
            (rows[leases.delivery[rows] == HELD], Kind.RELEASE, WAITING),
        ):
            if len(chosen):
                again = chosen is failed and not self.skip
                event = EventRows(
                    kind=kind,
                    at_ms=now_ms,
                    queue_offset=leases.offset[chosen],
                    attempt=0 if again else leases.attempt[chosen],
                    visible_at_ms=now_ms,
                    delivery=delivery,
                    message_group_hash=leases.group[chosen],
                )
                events.append(event)
        if self.skip:
            answer.skipped += len(failed)
            answer.exhausted.extend([key] if len(failed) else [])
        else:
            answer.unparked += len(failed)
        lifted = self._lifted(consumption)
        answer.lifted += len(lifted)
        if len(lifted):
            nowhere = np.full(len(lifted), -1, dtype=np.int64)
            events.append(
                EventRows(
                    kind=Kind.LIFT,
                    at_ms=now_ms,
                    queue_offset=nowhere,
                    message_group_hash=lifted,
                )
            )
        return events

    def _meant(self, groups: Int64s) -> npt.NDArray[np.bool_]:
        if self.message_groups is None:
            return np.ones(len(groups), dtype=np.bool_)
        return np.isin(groups, self.message_groups)

    def _lifted(self, consumption: Consumption) -> Int64s:
        quarantined = np.fromiter(consumption.quarantined, np.int64, len(consumption.quarantined))
        return quarantined[self._meant(quarantined)]
