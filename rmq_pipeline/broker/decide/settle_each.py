"""Settling independent receipts: each has its own answer."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from rmq_pipeline.broker.decide.redeliver import backoff_ms, release, released_behind
from rmq_pipeline.broker.decide.request import Decision, Request
from rmq_pipeline.broker.decide.settle import OnQueue, Settle, acks, by_queue, retries, standing
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.broker.state.lease_table import WAITING
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.errors import ReceiptHandleError
from rmq_pipeline.message import Int64s
from rmq_pipeline.receipt import Receipts
from rmq_pipeline.store.events import Kind

#: A pause grows by this for each message that waits already, up to _PAUSE_MAX_MS. Otherwise a
#: receiver of small batches would get the first messages again before it has passed the last one.
_PER_WAITING_MS: Final = 50
_PAUSE_MAX_MS: Final = 600_000


@dataclass(frozen=True, slots=True)
class AckEach(Request):
    """Acks of several callers; the answer is a mask of the valid receipts."""

    receipts: Receipts

    def decide(self, state: State, now_ms: int) -> Decision:
        """Settle all receipts; if some are invalid, settle the others."""
        try:
            decision = Settle(acks(self.receipts)).decide(state, now_ms)
        except ReceiptHandleError:
            holds = standing(self.receipts, state, now_ms=now_ms)
            decision = Settle(acks(self.receipts.take(holds))).decide(state, now_ms)
            decision.answer = holds
        else:
            decision.answer = np.ones(len(self.receipts), dtype=np.bool_)
        return decision


@dataclass(frozen=True, slots=True)
class FailEach(Request):
    """Request that fails the deliveries whose leases still run; ``failure`` is JSON."""

    receipts: Receipts
    failure: str

    def decide(self, state: State, now_ms: int) -> Decision:
        """Fail the valid receipts. An ended lease was counted, or released, when it ended."""
        holds = standing(self.receipts, state, now_ms=now_ms)
        return Settle(retries(self.receipts.take(holds), self.failure)).decide(state, now_ms)


@dataclass(frozen=True, slots=True)
class Renew(Request):
    """Request that extends running leases under the same receipts; the answer is their mask."""

    receipts: Receipts
    duration_ms: int

    def decide(self, state: State, now_ms: int) -> Decision:
        """Store one event for each queue."""
        holds = standing(self.receipts, state, now_ms=now_ms)
        kept = self.receipts.take(holds)
        decision = ChangeInvisible(kept, self.duration_ms, kept.delivery).decide(state, now_ms)
        decision.answer = holds
        return decision


@dataclass(frozen=True, slots=True)
class ReleaseEach(Request):
    """Request that releases deliveries that reached no client, without counting the attempt."""

    receipts: Receipts
    #: Delay in ms until they are visible; with order, leased messages behind them wait too. 0:
    #: none.
    pause_ms: int = 0

    def decide(self, state: State, now_ms: int) -> Decision:
        """Release the valid receipts; skip those that are settled or have ended."""
        decision = Decision()
        kept = self.receipts.take(standing(self.receipts, state, now_ms=now_ms))
        for part in by_queue(kept, state, now_ms=now_ms):
            if self.pause_ms:
                leases = part.consumption.leases
                waits = leases.alive & (leases.delivery == WAITING) & (leases.visible_at > now_ms)
                more_ms = _PER_WAITING_MS * int(np.count_nonzero(waits))
                pause_ms = max(self.pause_ms, min(_PAUSE_MAX_MS, self.pause_ms + more_ms))
                events = _released(part, visible_at_ms=now_ms + pause_ms)
            else:
                events = release(part.consumption, part.rows, visible_at_ms=now_ms)
            decision.events.extend(part.key.events(events, now_ms))
        return decision


@dataclass(frozen=True, slots=True)
class Release(Request):
    """Request that releases deliveries their receiver does not need; no attempt is counted."""

    receipts: Receipts

    def decide(self, state: State, now_ms: int) -> Decision:
        """Release all receipts or none; with order, also the leased messages behind them."""
        decision = Decision()
        for part in by_queue(self.receipts, state, now_ms=now_ms):
            events = _released(part, visible_at_ms=now_ms)
            decision.events.extend(part.key.events(events, now_ms))
        return decision


def _released(part: OnQueue, *, visible_at_ms: int) -> list[EventRows]:
    """Build the events that release the rows; with order, also the leased messages behind them."""
    consumption, rows = part.consumption, part.rows
    events = release(consumption, rows, visible_at_ms=visible_at_ms)
    moments = np.full(len(rows), visible_at_ms, dtype=np.int64)
    given = consumption.leases.offset[rows]
    return events + released_behind(consumption, rows, visible_at=moments, settled=given)


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
                    attempt_id_hash=leases.attempt_id_hash[part.rows],
                    message_group_hash=leases.group[part.rows],
                )
            )
        return decision
