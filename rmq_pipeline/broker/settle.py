"""Settling deliveries: ack, failure, a longer or shorter lease, and all of it in one step."""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline.broker.consumption import Consumption
from rmq_pipeline.broker.event_rows import EventRows, single
from rmq_pipeline.broker.lease_table import DOOMED, WAITING, Rows
from rmq_pipeline.broker.publish import Heads, Send, place
from rmq_pipeline.broker.redeliver import backoff_ms, release
from rmq_pipeline.broker.scan import QueueKey
from rmq_pipeline.broker.state import State
from rmq_pipeline.broker.writer import Decision, Request
from rmq_pipeline.errors import ReceiptHandleError, RequestError
from rmq_pipeline.group import Group
from rmq_pipeline.message import Int64s
from rmq_pipeline.receipt import Receipts
from rmq_pipeline.store.events import Kind

ACK, RETRY, DEAD_LETTER = 0, 1, 2
OUTCOMES: Final = {"ack": ACK, "retry": RETRY, "dead_letter": DEAD_LETTER}


@dataclass(frozen=True, slots=True)
class OnQueue:
    """The part of some receipts that speaks of one group and queue."""

    key: QueueKey
    group: Group
    consumption: Consumption
    #: Which of the receipts, and the row of each in the lease table.
    receipts: Rows
    rows: Rows


def by_queue(receipts: Receipts, state: State, *, now_ms: int) -> Iterator[OnQueue]:
    """The receipts queue by queue, each checked against its lease.

    Raises:
        ReceiptHandleError: one has ended, was settled, is foreign, or is given twice.
    """
    if not len(receipts):
        return
    ids = [receipts.group_id, receipts.topic_id, receipts.queue_id]
    order: Rows = np.lexsort([receipts.queue_offset, *reversed(ids)])  # type: ignore[arg-type]
    changes = np.zeros(len(order), dtype=np.bool_)
    changes[0] = True
    for column in ids:
        changes[1:] |= np.diff(column[order]) != 0
    bounds = [*np.flatnonzero(changes).tolist(), len(order)]
    for start, stop in itertools.pairwise(bounds):
        chosen = order[start:stop]
        first = chosen[0]
        key = QueueKey(*(int(column[first]) for column in ids))
        yield _on_queue(receipts, chosen, key=key, state=state, now_ms=now_ms)


def _on_queue(
    receipts: Receipts, chosen: Rows, *, key: QueueKey, state: State, now_ms: int
) -> OnQueue:
    group = state.groups.get(key.group_id)
    consumption = state.consumptions.get(key)
    if group is None or consumption is None:
        raise ReceiptHandleError(_ended_text(receipts, chosen[:1], n=len(chosen)))
    leases = consumption.leases
    offsets = receipts.queue_offset[chosen]
    rows = leases.find(offsets)
    wrong = rows < 0
    wrong |= leases.delivery[rows] != receipts.delivery[chosen] if len(leases.delivery) else True
    if not wrong.all():
        wrong |= leases.visible_at[rows] <= now_ms
    wrong[1:] |= offsets[1:] == offsets[:-1]
    if not wrong.any():
        void = consumption.expired_before(rows, now_ms)
        wrong = np.isin(rows, void) if len(void) else wrong
    if wrong.any():
        raise ReceiptHandleError(_ended_text(receipts, chosen[wrong], n=int(wrong.sum())))
    return OnQueue(key, group, consumption, chosen, rows)


def _ended_text(receipts: Receipts, wrong: Rows, *, n: int) -> str:
    row = int(wrong[0])
    return (
        f"{n} of {len(receipts)} receipts have ended or are unknown, the first in row {row}"
        f" (queue {receipts.queue_id[row]}, offset {receipts.queue_offset[row]})."
    )


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What became of deliveries; arrays of one length."""

    receipts: Receipts
    #: ACK, RETRY or DEAD_LETTER.
    outcome: npt.NDArray[np.int8]
    #: Delay of a retry in ms; -1: the group's backoff.
    retry_after_ms: Int64s
    reason: pa.Array


def acks(receipts: Receipts) -> Outcomes:
    """All of them done."""
    n = len(receipts)
    return Outcomes(
        receipts, np.zeros(n, np.int8), np.full(n, -1, np.int64), pa.nulls(n, pa.string())
    )


@dataclass(slots=True)
class Settled:
    """The answer to a settle."""

    acked: int = 0
    retried: int = 0
    dead_lettered: int = 0
    published: int = 0
    #: Queues with messages that are now to be copied to the dead letters.
    doomed: list[QueueKey] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """As the door answers it."""
        return {
            "acked": self.acked,
            "retried": self.retried,
            "dead_lettered": self.dead_lettered,
            "published": self.published,
        }


@dataclass(frozen=True, slots=True)
class Settle(Request):
    """Outcomes, messages to publish, files and keyed state: all of it, or nothing."""

    outcomes: Outcomes
    group: str | None = None
    window: tuple[str, int] | None = None
    settle_id: str = ""
    publish: tuple[Send, ...] = ()
    #: JSON of each sink file.
    sink_files: tuple[str, ...] = ()
    keyed_state: pa.RecordBatch | None = None

    def decide(self, state: State, now_ms: int) -> Decision:
        """Check everything first; then the events of every queue."""
        repeated = self._repeated(state)
        if repeated is not None:
            return Decision(repeated)
        epoch = state.fence(self.window)
        group = state.group(self.group) if self.group is not None else None
        parts = list(by_queue(self.outcomes.receipts, state, now_ms=now_ms))
        if group is not None and any(part.group is not group for part in parts):
            raise ReceiptHandleError(f"A receipt is not one of consumer group {group.name}.")
        decision = Decision(Settled())
        for part in parts:
            self._settle_queue(decision, part, now_ms=now_ms)
        heads: Heads = {}
        for send in self.publish:
            placed, _ = place(send, state, now_ms=now_ms, heads=heads)
            decision.placed.extend(placed)
            decision.answer.published += len(send)
        if self.keyed_state is not None:
            decision.keyed_state.append(self.keyed_state)
        if group is not None:
            self._note(decision, group, epoch=epoch, now_ms=now_ms)
        return decision

    def _repeated(self, state: State) -> Settled | None:
        """The answer of the same settle before, whose answer got lost on the way."""
        if self.window is None or not self.settle_id:
            return None
        known = state.windows.get(self.window[0])
        if known is None or known.settle_id != self._settle_key():
            return None
        return Settled(**json.loads(known.settle_answer))

    def _settle_key(self) -> str:
        """Its id within the name of its window: another epoch may count from one again."""
        return f"{self.window[1]}/{self.settle_id}" if self.window and self.settle_id else ""

    def _note(self, decision: Decision, group: Group, *, epoch: int, now_ms: int) -> None:
        """Sink files count from now on, and the window remembers this settle."""
        if self.sink_files:
            decision.events.append(
                EventRows(
                    kind=Kind.SINK_FILE,
                    at_ms=now_ms,
                    queue_offset=np.full(len(self.sink_files), -1, dtype=np.int64),
                    group_id=group.group_id,
                    epoch=epoch,
                    detail=self.sink_files,
                )
            )
        if self.window is not None:
            detail = {
                "window": self.window[0],
                "settle_id": self._settle_key(),
                "answer": decision.answer.counts(),
            }
            decision.events.append(
                single(
                    Kind.SETTLED,
                    now_ms,
                    group_id=group.group_id,
                    epoch=epoch,
                    detail=json.dumps(detail),
                )
            )

    def _settle_queue(self, decision: Decision, part: OnQueue, *, now_ms: int) -> None:
        answer: Settled = decision.answer
        outcome = self.outcomes.outcome[part.receipts]
        leases = part.consumption.leases
        events = []
        done = part.rows[outcome == ACK]
        if len(done):
            answer.acked += len(done)
            events.append(
                EventRows(
                    kind=Kind.ACK,
                    at_ms=now_ms,
                    queue_offset=leases.offset[done],
                    attempt=leases.attempt[done],
                    delivery=leases.delivery[done],
                    epoch=leases.epoch[done],
                    message_group_hash=leases.group[done],
                )
            )
        failed = np.flatnonzero(outcome != ACK)
        if len(failed):
            if part.consumption.ordered:
                failed = self._first_failures(part, failed)
            events.extend(
                self._failures(part, failed, outcome=outcome, answer=answer, now_ms=now_ms)
            )
            if any(np.any(rows.column("delivery", np.int64) == DOOMED) for rows in events):
                answer.doomed.append(part.key)
        decision.events.extend(part.key.events(events, now_ms))

    def _first_failures(self, part: OnQueue, failed: Rows) -> Rows:
        """With order, what failed behind a message that is to be retried is given back with it."""
        groups = part.consumption.leases.group[part.rows[failed]]
        retried = self.outcomes.outcome[part.receipts[failed]] == RETRY
        keep, stopped = [], set()
        for i, group in enumerate(groups.tolist()):  # failures are few, and these are a group's
            if group in stopped:
                continue
            keep.append(failed[i])
            if retried[i] and group:
                stopped.add(group)
        return np.array(keep, dtype=np.intp)

    def _failures(
        self,
        part: OnQueue,
        failed: Rows,
        *,
        outcome: npt.NDArray[np.int8],
        answer: Settled,
        now_ms: int,
    ) -> list[EventRows]:
        leases = part.consumption.leases
        rows = part.rows[failed]
        attempt = leases.attempt[rows]
        doomed = (outcome[failed] == DEAD_LETTER) | (attempt >= part.group.max_attempts)
        answer.retried += int((~doomed).sum())
        answer.dead_lettered += int(doomed.sum())
        given = self.outcomes.retry_after_ms[part.receipts[failed]]
        delay = np.where(given >= 0, given, backoff_ms(part.group, attempt))
        visible_at = np.where(doomed, now_ms, now_ms + delay)
        reasons = self.outcomes.reason.take(pa.array(part.receipts[failed]))
        events = [
            EventRows(
                kind=Kind.RETRY,
                at_ms=now_ms,
                queue_offset=leases.offset[rows],
                attempt=attempt,
                visible_at_ms=visible_at,
                delivery=np.where(doomed, DOOMED, WAITING),
                message_group_hash=leases.group[rows],
                detail=None if reasons.null_count == len(reasons) else reasons.to_pylist(),
            )
        ]
        if part.consumption.ordered:
            settled = leases.offset[part.rows[(outcome == ACK)]]
            events.extend(
                released_behind(part.consumption, rows, visible_at=visible_at, settled=settled)
            )
        return events


def released_behind(
    consumption: Consumption, failed: Rows, *, visible_at: Int64s, settled: Int64s
) -> list[EventRows]:
    """What of the failed messages' groups lies behind them and is unsettled is given back."""
    leases = consumption.leases
    failed_groups = np.unique(leases.group[failed])
    of_groups = leases.of_groups(failed_groups[failed_groups != 0])
    gone = np.concatenate([settled, leases.offset[failed]])
    # What waits already keeps its own moment: it may be later than this one's.
    leased = of_groups[leases.delivery[of_groups] > WAITING]
    rest = leased[~np.isin(leases.offset[leased], gone)]
    if not len(rest):
        return []
    # Behind which failure: the first one of its group.
    order = np.lexsort((leases.offset[failed], leases.group[failed]))
    groups = leases.group[failed][order]
    firsts = np.flatnonzero(np.concatenate(([True], groups[1:] != groups[:-1])))
    at = firsts[np.searchsorted(groups[firsts], leases.group[rest])]
    behind = leases.offset[rest] > leases.offset[failed][order][at]
    if not behind.any():
        return []
    return release(consumption, rest[behind], visible_at_ms=visible_at[order][at][behind])


@dataclass(frozen=True, slots=True)
class ChangeInvisible(Request):
    """Deliveries get another end; their old receipts are void."""

    receipts: Receipts
    duration_ms: int
    #: New delivery numbers, one each.
    deliveries: Int64s

    def decide(self, state: State, now_ms: int) -> Decision:
        """One event for each queue."""
        decision = Decision()
        for part in by_queue(self.receipts, state, now_ms=now_ms):
            leases = part.consumption.leases
            decision.events.append(
                EventRows(
                    kind=Kind.INVISIBLE,
                    at_ms=now_ms,
                    **part.key._asdict(),
                    queue_offset=leases.offset[part.rows],
                    attempt=leases.attempt[part.rows],
                    visible_at_ms=now_ms + self.duration_ms,
                    delivery=self.deliveries[part.receipts],
                    epoch=leases.epoch[part.rows],
                    message_group_hash=leases.group[part.rows],
                )
            )
        return decision


def outcomes_of(receipts: Receipts, columns: Mapping[str, pa.Array]) -> Outcomes:
    """Outcomes from the columns of schema.OUTCOME.

    Raises:
        RequestError: an outcome that is none of ack, retry, dead_letter; a negative delay.
    """
    texts = columns["outcome"].dictionary_encode()
    codes = np.zeros(len(texts.dictionary), dtype=np.int8)
    for i, text in enumerate(texts.dictionary.to_pylist()):
        if text not in OUTCOMES:
            raise RequestError(f"Outcome {text!r} is none of {', '.join(OUTCOMES)}.")
        codes[i] = OUTCOMES[text]
    if texts.indices.null_count:
        raise RequestError("An outcome is null.")
    delays = columns["retry_after_ms"].fill_null(-1).to_numpy()
    if np.any((delays < 0) & columns["retry_after_ms"].is_valid().to_numpy(zero_copy_only=False)):
        raise RequestError("retry_after_ms is negative.")
    outcome = codes[texts.indices.to_numpy()] if len(receipts) else codes[:0]
    return Outcomes(receipts, outcome, delays, columns["reason"])
