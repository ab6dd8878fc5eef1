"""Settling deliveries: acks, failures, and changed leases, with all that belongs to them."""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits
from rmq_pipeline.broker.decide.publish import Send, place
from rmq_pipeline.broker.decide.queues import Heads
from rmq_pipeline.broker.decide.redeliver import (
    backoff_ms,
    counted_in_place,
    exhausts,
    give_up,
    released_behind,
)
from rmq_pipeline.broker.decide.request import BULK_ROWS, Decision, Request
from rmq_pipeline.broker.state.consumption import Consumption, QueueKey
from rmq_pipeline.broker.state.event_rows import EventRows, single
from rmq_pipeline.broker.state.lease_table import WAITING, Rows
from rmq_pipeline.broker.state.state import State
from rmq_pipeline.errors import ReceiptHandleError, RequestError
from rmq_pipeline.failure import Failure
from rmq_pipeline.group import Group, OnFailure
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.receipt import Receipts
from rmq_pipeline.store.events import Kind

#: GIVE_UP: the last attempt, even if others are left; the group's on_failure decides.
#: RETRY_IN_PLACE: the attempt counts and the lease continues, as the client retries the message
#: itself.
ACK, RETRY, DEAD_LETTER, GIVE_UP, RETRY_IN_PLACE = 0, 1, 2, 3, 4
OUTCOMES: Final = {
    "ack": ACK,
    "retry": RETRY,
    "dead_letter": DEAD_LETTER,
    "give_up": GIVE_UP,
    "retry_in_place": RETRY_IN_PLACE,
}
Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Outcomes of deliveries, as arrays of one length."""

    receipts: Receipts
    #: One value of OUTCOMES each.
    outcome: npt.NDArray[np.int8]
    #: Delay of a retry in ms; -1: the group's backoff.
    retry_after_ms: Int64s
    #: JSON of each failure; null without a report.
    failure: pa.Array
    #: Idempotency key of the effect behind an ack, null for none; None: no row has one.
    idempotency_key: pa.Array | None = None


def acks(receipts: Receipts) -> Outcomes:
    """Return an ack for each receipt."""
    n = len(receipts)
    return Outcomes(
        receipts, np.zeros(n, np.int8), np.full(n, -1, np.int64), pa.nulls(n, pa.string())
    )


def retries(receipts: Receipts, failure: str) -> Outcomes:
    """Return a retry after the group's backoff for each receipt; ``failure`` is JSON."""
    n = len(receipts)
    said = pa.repeat(pa.scalar(failure, pa.string()), n)
    return Outcomes(receipts, np.full(n, RETRY, np.int8), np.full(n, -1, np.int64), said)


def outcomes_of(receipts: Receipts, columns: Mapping[str, pa.Array]) -> Outcomes:
    """Return outcomes from the columns of schema.OUTCOME.

    Raises:
        RequestError: an outcome is not in OUTCOMES; a delay is negative; an idempotency key is
            empty or too long.
    """
    texts = columns["outcome"].dictionary_encode()
    codes = np.zeros(len(texts.dictionary), dtype=np.int8)
    for i, text in enumerate(texts.dictionary.to_pylist()):
        if text not in OUTCOMES:
            raise RequestError(f"Outcome {text!r} is not one of {', '.join(OUTCOMES)}.")
        codes[i] = OUTCOMES[text]
    if texts.indices.null_count:
        raise RequestError("An outcome is null.")
    delays = columns["retry_after_ms"].fill_null(-1).to_numpy()
    if np.any((delays < 0) & columns["retry_after_ms"].is_valid().to_numpy(zero_copy_only=False)):
        raise RequestError("retry_after_ms is negative.")
    outcome = codes[texts.indices.to_numpy()] if len(receipts) else codes[:0]
    return Outcomes(
        receipts,
        outcome,
        delays,
        _failures_of(columns, outcome != ACK),
        checked_keys(columns["idempotency_key"]),
    )


def _failures_of(columns: Mapping[str, pa.Array], failed: npt.NDArray[np.bool_]) -> pa.Array:
    """Return the failure of each failed row as JSON, encoded once per distinct failure."""
    said = [columns[name] for name in ("reason", "error_type", "run_id", "traceback")]
    rows = np.flatnonzero(failed)
    if not len(rows) or all(column.null_count == len(column) for column in said):
        return pa.nulls(len(failed), pa.string())
    encoded = [column.take(pa.array(rows)).dictionary_encode() for column in said]
    code = np.zeros(len(rows), dtype=np.int64)
    for column in encoded:
        own = column.indices.fill_null(-1).to_numpy().astype(np.int64) + 1
        code = code * (len(column.dictionary) + 1) + own
    _, firsts, place = np.unique(code, return_index=True, return_inverse=True)
    values = zip(*(column.take(pa.array(firsts)).to_pylist() for column in encoded), strict=True)
    texts = [_failure_json(value) for value in values]
    found = np.full(len(failed), -1, dtype=np.int64)
    found[rows] = place
    return pa.array(texts, pa.string()).take(pa.array(found, mask=found < 0))


def _failure_json(said: tuple[str | None, ...]) -> str | None:
    if not any(said):
        return None
    reason, error_type, run_id, traceback = said
    failure = Failure.of(reason, error_type=error_type, run_id=run_id, traceback=traceback)
    return failure.to_json()


def checked_keys(keys: pa.Array) -> pa.Array:
    """Check idempotency keys, and return them; null where a row has none.

    Raises:
        RequestError: one is empty or too long.
    """
    if keys.null_count == len(keys):
        return keys
    lengths = pc.utf8_length(keys)
    bad = pc.or_(pc.equal(lengths, 0), pc.greater(lengths, limits.IDEMPOTENCY_KEY_LENGTH))
    if pc.any(bad).as_py():
        row = pc.index(bad, True).as_py()
        raise RequestError(
            f"An idempotency key must have 1 to {limits.IDEMPOTENCY_KEY_LENGTH} characters; that in"
            f" row {row} has {lengths[row]}."
        )
    return keys


def effect_events(
    keys: pa.Array, done: npt.NDArray[np.bool_], *, group_id: int, now_ms: int
) -> list[EventRows]:
    """Build the events that record the distinct keys of acked messages."""
    if keys.null_count == len(keys):
        return []
    carried_out = pc.drop_null(pc.unique(keys.filter(pa.array(done))))
    if not len(carried_out):
        return []
    return [
        EventRows(
            kind=Kind.EFFECT,
            at_ms=now_ms,
            group_id=group_id,
            queue_offset=np.full(len(carried_out), -1, dtype=np.int64),
            detail=carried_out.to_pylist(),
        )
    ]


@dataclass(frozen=True, slots=True)
class OnQueue:
    """Receipts of one group and queue."""

    key: QueueKey
    group: Group
    consumption: Consumption
    #: Index of each receipt, and its row in the lease table.
    receipts: Rows
    rows: Rows


def by_queue(receipts: Receipts, state: State, *, now_ms: int) -> Iterator[OnQueue]:
    """Yield the receipts queue by queue, each checked against its lease.

    Raises:
        ReceiptHandleError: a receipt has ended, was settled, is unknown, or appears twice.
    """
    for key, chosen in _parts(receipts):
        part, wrong = _on_queue(receipts, chosen, key=key, state=state, now_ms=now_ms)
        if part is None or wrong.any():
            text = _ended_text(receipts, chosen[wrong], n=int(wrong.sum()))
            raise ReceiptHandleError(text)
        yield part


def standing(receipts: Receipts, state: State, *, now_ms: int) -> Mask:
    """Return the mask of valid receipts; of a repeated receipt, only the first is valid."""
    holds = np.ones(len(receipts), dtype=np.bool_)
    for key, chosen in _parts(receipts):
        _, wrong = _on_queue(receipts, chosen, key=key, state=state, now_ms=now_ms)
        holds[chosen] = ~wrong
    return holds


def _parts(receipts: Receipts) -> Iterator[tuple[QueueKey, Rows]]:
    """Yield the indices of the receipts of each queue, by offset."""
    if not len(receipts):
        return
    ids = [receipts.group_id, receipts.topic_id, receipts.queue_id]
    if len(receipts) == 1:
        yield QueueKey(*(int(column[0]) for column in ids)), np.zeros(1, dtype=np.intp)
        return
    order: Rows = np.lexsort([receipts.queue_offset, *reversed(ids)])  # type: ignore[arg-type]
    changes = np.zeros(len(order), dtype=np.bool_)
    changes[0] = True
    for column in ids:
        changes[1:] |= np.diff(column[order]) != 0
    bounds = [*np.flatnonzero(changes).tolist(), len(order)]
    for start, stop in itertools.pairwise(bounds):
        chosen = order[start:stop]
        first = chosen[0]
        yield QueueKey(*(int(column[first]) for column in ids)), chosen


def _on_queue(
    receipts: Receipts, chosen: Rows, *, key: QueueKey, state: State, now_ms: int
) -> tuple[OnQueue | None, Mask]:
    """Return the receipts of a queue, None if the group has none, and a mask of invalid ones."""
    group = state.groups.get(key.group_id)
    consumption = state.consumptions.get(key)
    if group is None or consumption is None:
        return None, np.ones(len(chosen), dtype=np.bool_)
    leases = consumption.leases
    offsets = receipts.queue_offset[chosen]
    rows = leases.find(offsets)
    wrong = rows < 0
    wrong |= leases.delivery[rows] != receipts.delivery[chosen] if len(leases.delivery) else True
    if not wrong.all():
        wrong |= leases.visible_at[rows] <= now_ms
    if len(chosen) > 1:
        good = np.flatnonzero(~wrong)
        # An older receipt of the same message is invalid anyway, so it makes no valid one a
        # repetition.
        wrong[good[1:][offsets[good[1:]] == offsets[good[:-1]]]] = True
    void = consumption.expired_before(rows[~wrong] if wrong.any() else rows, now_ms)
    if len(void):
        wrong |= np.isin(rows, void)
    return OnQueue(key, group, consumption, chosen, rows), wrong


def _ended_text(receipts: Receipts, wrong: Rows, *, n: int) -> str:
    row = int(wrong[0])
    return (
        f"{n} of {len(receipts)} receipts have ended or are unknown, the first in row {row}"
        f" (queue {receipts.queue_id[row]}, offset {receipts.queue_offset[row]})."
    )


@dataclass(slots=True)
class Settled:
    """Answer of a settle."""

    acked: int = 0
    retried: int = 0
    dead_lettered: int = 0
    parked: int = 0
    published: int = 0
    #: Version of the group's sink with the files of this settle; 0: it has none.
    sink_version: int = 0
    #: Queues with messages that must now be copied to the dead letters.
    exhausted: list[QueueKey] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Return the counts as the Flight endpoint does.

        It has ``parked`` and ``sink_version`` only if they are above 0.
        """
        counts = {
            "acked": self.acked,
            "retried": self.retried,
            "dead_lettered": self.dead_lettered,
            "published": self.published,
        }
        rare = {"parked": self.parked, "sink_version": self.sink_version}
        return counts | {name: value for name, value in rare.items() if value}


@dataclass(frozen=True, slots=True)
class Settle(Request):
    """Request with outcomes, messages to publish, files and keyed state: stored as a whole."""

    outcomes: Outcomes
    group: str | None = None
    window: tuple[str, int] | None = None
    settle_id: str = ""
    publish: tuple[Send, ...] = ()
    #: JSON of each sink file.
    sink_files: tuple[str, ...] = ()
    keyed_state: pa.RecordBatch | None = None
    #: True if leases behind a dead letter of their message group continue.
    keep_behind: bool = False

    def is_bulk(self) -> bool:
        """Return True if it settles or publishes many messages."""
        return len(self.outcomes.receipts) >= BULK_ROWS or any(s.is_bulk() for s in self.publish)

    def decide(self, state: State, now_ms: int) -> Decision:
        """Check everything, then build the events of each queue."""
        repeated = self._repeated(state)
        if repeated is not None:
            return Decision(repeated)
        epoch = state.fence(self.window)
        group = state.group(self.group) if self.group is not None else None
        parts = list(by_queue(self.outcomes.receipts, state, now_ms=now_ms))
        if group is not None and any(part.group is not group for part in parts):
            raise ReceiptHandleError(
                f"A receipt belongs to another consumer group, not to {group.name}."
            )
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
            decision.events.extend(self._effects(group, now_ms))
            if self.sink_files:
                decision.answer.sink_version = state.sinks.of(group.group_id).version + 1
            self._note(decision, group, epoch=epoch, now_ms=now_ms)
        return decision

    def _effects(self, group: Group, now_ms: int) -> list[EventRows]:
        keys = self.outcomes.idempotency_key
        if keys is None:
            return []
        done = self.outcomes.outcome == ACK
        return effect_events(keys, done, group_id=group.group_id, now_ms=now_ms)

    def _repeated(self, state: State) -> Settled | None:
        """Return the answer of the same settle if it was stored before and its answer was lost."""
        if self.window is None or not self.settle_id:
            return None
        known = state.windows.get(self.window[0])
        if known is None or known.settle_id != self._settle_key():
            return None
        return Settled(**json.loads(known.settle_answer))

    def _settle_key(self) -> str:
        """Return the id with its epoch, because another epoch may use the same ids."""
        return f"{self.window[1]}/{self.settle_id}" if self.window and self.settle_id else ""

    def _note(self, decision: Decision, group: Group, *, epoch: int, now_ms: int) -> None:
        """Make the sink files count, and record this settle in the window."""
        if self.sink_files:
            decision.events.append(
                EventRows(
                    kind=Kind.SINK_FILE,
                    at_ms=now_ms,
                    queue_offset=np.full(len(self.sink_files), -1, dtype=np.int64),
                    group_id=group.group_id,
                    delivery=decision.answer.sink_version,
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
        events: list[EventRows] = []
        done = part.rows[outcome == ACK]
        if len(done):
            answer.acked += len(done)
            events.extend(part.consumption.acks(done, now_ms=now_ms))
        stays = np.flatnonzero(outcome == RETRY_IN_PLACE)
        if len(stays):
            answer.retried += len(stays)
            said = self.outcomes.failure.take(pa.array(part.receipts[stays]))
            rows = part.rows[stays]
            tried = counted_in_place(leases, rows, group=part.group, said=said, now_ms=now_ms)
            events.append(tried)
        failed = np.flatnonzero((outcome != ACK) & (outcome != RETRY_IN_PLACE))
        if len(failed):
            failed = self._first_failures(part, failed)
            events.extend(
                self._failures(part, failed, outcome=outcome, answer=answer, now_ms=now_ms)
            )
            if exhausts(events):
                answer.exhausted.append(part.key)
        decision.events.extend(part.key.events(events, now_ms))

    def _first_failures(self, part: OnQueue, failed: Rows) -> Rows:
        """Drop failures behind a message of the same group that is retried.

        The retry releases them.

        Drop also the failures behind one that quarantines the message group.
        """
        stops = self.outcomes.outcome[part.receipts[failed]] != DEAD_LETTER
        if part.group.on_failure == "dead_letter_group":
            stops[:] = True
        chosen: Rows = failed[part.consumption.before_stops(part.rows[failed], stops)]
        return chosen

    def _failures(
        self,
        part: OnQueue,
        failed: Rows,
        *,
        outcome: npt.NDArray[np.int8],
        answer: Settled,
        now_ms: int,
    ) -> list[EventRows]:
        leases, group = part.consumption.leases, part.group
        rows = part.rows[failed]
        rejected = outcome[failed] == DEAD_LETTER
        spent = (leases.attempt[rows] >= group.max_attempts) | (outcome[failed] == GIVE_UP)
        forgiven = part.consumption.blameless(spent & ~rejected) & (outcome[failed] != GIVE_UP)
        final = rejected | (spent & ~forgiven)
        # The consumer rejected the message, so on_failure "park" does not apply.
        parked = final & ~rejected if group.on_failure == "park" else np.zeros_like(final)
        policy: OnFailure = "dead_letter" if group.on_failure == "park" else group.on_failure
        answer.retried += int((~final).sum())
        answer.parked += int(parked.sum())
        answer.dead_lettered += int((final & ~parked).sum())
        settled = leases.offset[part.rows[(outcome == ACK)]]
        said = self.outcomes.failure.take(pa.array(part.receipts[failed])).to_pylist()
        charged = np.where(forgiven, 0, leases.attempt[rows])[~final]
        events = self._retries(
            part, failed[~final], charged=charged, settled=settled, now_ms=now_ms
        )
        own = rows[spent & ~rejected][:1]
        events.extend(part.consumption.begun_again(own, settled=part.rows, now_ms=now_ms))
        # A failed message behind a dead letter keeps its own delay: it is not released.
        settled = np.concatenate([settled, leases.offset[rows[~final]]])
        for chosen, how in ((final & ~parked, policy), (parked, group.on_failure)):
            if chosen.any():
                events.extend(
                    give_up(
                        part.consumption,
                        rows[chosen],
                        policy=how,
                        now_ms=now_ms,
                        said=[said[i] for i in np.flatnonzero(chosen).tolist()],
                        settled=settled,
                        keep_behind=self.keep_behind,
                    )
                )
        return events

    def _retries(
        self, part: OnQueue, failed: Rows, *, charged: Int32s, settled: Int64s, now_ms: int
    ) -> list[EventRows]:
        """Build the events of retries; ``charged`` is the number of deliveries that count."""
        if not len(failed):
            return []
        leases = part.consumption.leases
        rows = part.rows[failed]
        given = self.outcomes.retry_after_ms[part.receipts[failed]]
        delay = np.where(given >= 0, given, backoff_ms(part.group, leases.attempt[rows]))
        said = self.outcomes.failure.take(pa.array(part.receipts[failed]))
        events = [
            EventRows(
                kind=Kind.RETRY,
                at_ms=now_ms,
                queue_offset=leases.offset[rows],
                attempt=charged,
                visible_at_ms=now_ms + delay,
                delivery=WAITING,
                message_group_hash=leases.group[rows],
                detail=None if said.null_count == len(said) else said.to_pylist(),
            )
        ]
        events.extend(
            released_behind(part.consumption, rows, visible_at=now_ms + delay, settled=settled)
        )
        return events
