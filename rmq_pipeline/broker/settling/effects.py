"""Completed effects of consumers, remembered by idempotency key within the group's window."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits, schema
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.event_rows import EventRows
from rmq_pipeline.errors import RequestError
from rmq_pipeline.store.events import Kind
from rmq_pipeline.tables import columns_of


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
            f"An idempotency key has 1 to {limits.IDEMPOTENCY_KEY_LENGTH} characters; that in row"
            f" {row} has {lengths[row]}."
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


def seen_before(engine: Engine, group: str, *, keys: pa.Table) -> pa.Table:
    """Return when each key's effect was last recorded in the group's window, as schema.SEEN."""
    asked = checked_keys(columns_of(keys, schema.IDEMPOTENCY_KEY)["idempotency_key"])
    known = engine.state.group(group)
    engine.dispatched(engine.state.changed(Kind.EFFECT, known.group_id))
    after_ms = engine.clock.now_ms() - known.idempotency_window_ms
    seen = engine.database.effects_seen(known.group_id, keys=asked, after_ms=after_ms)
    return pa.table([asked, seen], schema=schema.SEEN)
