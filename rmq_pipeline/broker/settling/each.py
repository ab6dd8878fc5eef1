"""Settling receipts that have nothing to do with each other: each has its own answer."""

from dataclasses import dataclass

import numpy as np

from rmq_pipeline.broker.event_rows import run_starts
from rmq_pipeline.broker.failures.giving_back import release, released_behind
from rmq_pipeline.broker.receiving.lease_table import LeaseTable, Rows
from rmq_pipeline.broker.settling.outcomes import acks, retries
from rmq_pipeline.broker.settling.settle import ChangeInvisible, Settle, by_queue, standing
from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.writer import Decision, Request
from rmq_pipeline.errors import ReceiptHandleError
from rmq_pipeline.receipt import Receipts


@dataclass(frozen=True, slots=True)
class AckEach(Request):
    """Acks of several callers; the answer is a mask of those that took effect."""

    receipts: Receipts

    def decide(self, state: State, now_ms: int) -> Decision:
        """All at once; without those that do not hold, when there are such."""
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
    """Deliveries that have failed, as far as they still stand; ``failure`` is JSON."""

    receipts: Receipts
    failure: str

    def decide(self, state: State, now_ms: int) -> Decision:
        """The ended ones were counted, or given back, when they ended."""
        holds = standing(self.receipts, state, now_ms=now_ms)
        return Settle(retries(self.receipts.take(holds), self.failure)).decide(state, now_ms)


@dataclass(frozen=True, slots=True)
class Renew(Request):
    """Leases that still run end later, under the receipts they have; the answer is their mask."""

    receipts: Receipts
    duration_ms: int

    def decide(self, state: State, now_ms: int) -> Decision:
        """One event for each queue."""
        holds = standing(self.receipts, state, now_ms=now_ms)
        kept = self.receipts.take(holds)
        decision = ChangeInvisible(kept, self.duration_ms, kept.delivery).decide(state, now_ms)
        decision.answer = holds
        return decision


@dataclass(frozen=True, slots=True)
class GiveBack(Request):
    """Deliveries that nobody got: visible at once, as if they had not been."""

    receipts: Receipts

    def decide(self, state: State, now_ms: int) -> Decision:
        """Those that are settled or have ended are let be."""
        decision = Decision()
        kept = self.receipts.take(standing(self.receipts, state, now_ms=now_ms))
        for part in by_queue(kept, state, now_ms=now_ms):
            events = release(part.consumption, part.rows, visible_at_ms=now_ms)
            decision.events.extend(part.key.events(events, now_ms))
        return decision


@dataclass(frozen=True, slots=True)
class Release(Request):
    """Deliveries that their receiver does without: visible at once, as if they had not been."""

    receipts: Receipts

    def decide(self, state: State, now_ms: int) -> Decision:
        """All or none; with order, what is delivered behind them is given back with them."""
        decision = Decision()
        for part in by_queue(self.receipts, state, now_ms=now_ms):
            consumption, rows = part.consumption, part.rows
            events = release(consumption, rows, visible_at_ms=now_ms)
            if consumption.ordered:
                firsts = rows[_first_of_groups(consumption.leases, rows)]
                moments = np.full(len(firsts), now_ms, dtype=np.int64)
                given = consumption.leases.offset[rows]
                events += released_behind(consumption, firsts, visible_at=moments, settled=given)
            decision.events.extend(part.key.events(events, now_ms))
        return decision


def _first_of_groups(leases: LeaseTable, rows: Rows) -> Rows:
    """Which of these rows are the first of their message groups."""
    order = np.lexsort((leases.offset[rows], leases.group[rows]))
    first: Rows = order[run_starts(leases.group[rows][order])]
    return first
