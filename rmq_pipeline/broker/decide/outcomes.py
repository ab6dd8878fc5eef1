"""Outcomes of deliveries in a settle: the result, the retry delay, and the failure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits
from rmq_pipeline.broker.state.event_rows import EventRows
from rmq_pipeline.errors import RequestError
from rmq_pipeline.failure import Failure
from rmq_pipeline.message import Int64s
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
