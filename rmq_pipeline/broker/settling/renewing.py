"""Changing the end of running leases."""

from dataclasses import dataclass

from rmq_pipeline.broker.event_rows import EventRows
from rmq_pipeline.broker.failures.redeliver import backoff_ms
from rmq_pipeline.broker.settling.settle import by_queue
from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.writer import Decision, Request
from rmq_pipeline.message import Int64s
from rmq_pipeline.receipt import Receipts
from rmq_pipeline.store.events import Kind


@dataclass(frozen=True, slots=True)
class ChangeInvisible(Request):
    """Request that sets a new end for leases; their old receipts become void."""

    receipts: Receipts
    #: Duration from now on; below 0: the group's backoff after a failure.
    duration_ms: int
    #: New delivery numbers, one for each receipt.
    deliveries: Int64s

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store one event for each queue."""
        decision = Decision()
        for part in by_queue(self.receipts, state, now_ms=now_ms):
            leases = part.consumption.leases
            duration: int | Int64s = self.duration_ms
            if duration < 0:
                duration = backoff_ms(part.group, leases.attempt[part.rows])
            decision.events.append(
                EventRows(
                    kind=Kind.INVISIBLE,
                    at_ms=now_ms,
                    **part.key._asdict(),
                    queue_offset=leases.offset[part.rows],
                    attempt=leases.attempt[part.rows],
                    visible_at_ms=now_ms + duration,
                    delivery=self.deliveries[part.receipts],
                    epoch=leases.epoch[part.rows],
                    message_group_hash=leases.group[part.rows],
                )
            )
        return decision
