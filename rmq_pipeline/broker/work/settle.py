"""The part of a settle outside the writer: reading tables, dead-lettering, answering."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rmq_pipeline import receipt, schema
from rmq_pipeline.broker.decide.publish import prepare
from rmq_pipeline.broker.decide.settle import (
    DEAD_LETTER,
    Outcomes,
    Settle,
    Settled,
    acks,
    checked_keys,
    outcomes_of,
)
from rmq_pipeline.broker.decide.settle_each import ChangeInvisible
from rmq_pipeline.broker.state.consumption import QueueKey
from rmq_pipeline.broker.work import arguments
from rmq_pipeline.broker.work.dead_letter import dead_letter_exhausted, told
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.keyed_state import state_batch
from rmq_pipeline.broker.work.sinks import described_files
from rmq_pipeline.errors import LogFencedError, StandbyError, TableSchemaError
from rmq_pipeline.failure import Failure
from rmq_pipeline.message import Int64s
from rmq_pipeline.receipt import Receipts
from rmq_pipeline.store.events import Kind
from rmq_pipeline.tables import columns_of, sound

log = logging.getLogger(__name__)


def receipts_of(given: pa.Table | Sequence[str]) -> Receipts:
    """Return receipts from a table with a column receipt_handle, or from a list of handles.

    Raises:
        TableSchemaError: the column is missing, or the argument is neither.
        ReceiptHandleError: a value is not a receipt handle.
    """
    if isinstance(given, pa.Array | pa.ChunkedArray):
        given = pa.table({"receipt_handle": given})
    if isinstance(given, pa.Table):
        # Only receipt_handle is checked: a message with damaged properties can still be settled by
        # its receipt.
        if given.schema.get_field_index("receipt_handle") < 0:  # missing, or there more than once
            raise TableSchemaError(
                "receipts have one column receipt_handle; build the table with it."
            )
        return receipt.decode(sound(given.select(["receipt_handle"]), "receipts").column(0))
    if isinstance(given, str):
        given = [given]
    given = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(one, str) for one in given):
        raise TableSchemaError(
            "receipts are a table with the column receipt_handle, or a list of handles, not"
            f" {str(given)[:200]!r}."
        )
    return receipt.decode(pa.array(given, pa.string()))


def ack(engine: Engine, given: pa.Table | Sequence[str]) -> None:
    """Ack deliveries."""
    if (request := ack_request(given)) is not None:
        engine.submit(request)


def ack_request(given: pa.Table | Sequence[str]) -> Settle | None:
    """Return the request that acks deliveries; None if there are none.

    Raises:
        as ``receipts_of``.
    """
    receipts = receipts_of(given)
    return Settle(acks(receipts)) if len(receipts) else None


def change_invisible_duration(
    engine: Engine, given: pa.Table | Sequence[str], *, duration_ms: int
) -> pa.Table:
    """Set new ends for leases; return their new receipts."""
    receipts = receipts_of(given)
    deliveries = engine.new_deliveries(len(receipts))
    request = ChangeInvisible(receipts, arguments.invisible_ms(duration_ms), deliveries)
    if len(receipts):
        engine.submit(request)
    renewed = Receipts(
        receipts.group_id,
        receipts.topic_id,
        receipts.queue_id,
        receipts.queue_offset,
        deliveries,
    )
    return pa.table({"receipt_handle": receipt.encode(renewed)})


def forward(
    engine: Engine,
    given: pa.Table | Sequence[str],
    *,
    reason: str,
    keep_behind: bool = False,
) -> None:
    """Reject deliveries, and dead-letter them at once.

    Args:
        keep_behind: leases behind them in their message groups continue.

    Raises:
        ReceiptHandleError: a receipt is not valid.
        OperatorError, LookupError: the deliveries are settled, but a message cannot be read or
            copied. It is not in the dead letters yet.
    """
    reason = arguments.text(reason or "", "reason")
    receipts = receipts_of(given)
    n = len(receipts)
    if not n:
        return
    outcomes = Outcomes(
        receipts,
        np.full(n, DEAD_LETTER, dtype=np.int8),
        np.full(n, -1, dtype=np.int64),
        pa.repeat(pa.scalar(Failure.of(reason).to_json() if reason else None, pa.string()), n),
    )
    settled: Settled = engine.submit(Settle(outcomes, keep_behind=keep_behind))
    asked = {key: _offsets_in(receipts, key) for key in settled.exhausted}
    for key, offsets in asked.items():
        engine.dead_letter_failures.forget(key, offsets)
    kept = dead_letter_exhausted(engine, settled.exhausted).kept if asked else {}
    for key, why in kept.items():
        mine = [offset for offset in asked[key].tolist() if offset in why]
        if mine:
            raise told(why[mine[0]])


def _offsets_in(receipts: Receipts, key: QueueKey) -> Int64s:
    chosen = receipts.queue_id == key.queue_id
    chosen &= (receipts.topic_id == key.topic_id) & (receipts.group_id == key.group_id)
    offsets: Int64s = receipts.queue_offset[chosen]
    return offsets


def settle(
    engine: Engine,
    group: str,
    *,
    outcomes: pa.Table,
    settle_id: str,
    window: tuple[str, int] | None,
    publish: Mapping[str, pa.Table],
    sink_files: pa.Table | None,
    state: pa.Table | None,
    topic: str,
) -> dict[str, Any]:
    """Settle a batch of a consumer with its messages, files and state, in one frame."""
    columns = columns_of(sound(outcomes, "outcomes"), schema.OUTCOME)
    receipts = receipt.decode(columns["receipt_handle"])
    now_ms = engine.clock.now_ms()
    if publish:
        engine.admit()
    sends = [
        prepare(
            engine.state.topic(name).topic,
            columns_of(messages, schema.SEND),
            ids=engine.ids,
            delay_max_ms=engine.settings.delay_max_ms,
            now_ms=now_ms,
            delay_levels_ms=engine.settings.delay_levels_ms,
        )
        for name, messages in publish.items()
    ]
    request = Settle(
        outcomes_of(receipts, columns),
        group=group,
        window=arguments.held(window),
        settle_id=arguments.text(settle_id, "settle_id"),
        publish=tuple(sends),
        sink_files=tuple(json.dumps(row) for row in described_files(sink_files)),
        keyed_state=state_batch(engine, group, topic=topic, table=state)
        if state is not None
        else None,
    )
    settled: Settled = engine.submit(request)
    if settled.exhausted:
        try:
            dead_letter_exhausted(engine, settled.exhausted)
        except (LogFencedError, StandbyError) as error:
            # The batch is settled, and these errors say that nothing was changed. The broker that
            # leads does the rest, as after a restart.
            log.warning("exhausted messages are left to the next leader: %s", error.message)
    return settled.counts()


def seen_before(engine: Engine, group: str, *, keys: pa.Table) -> pa.Table:
    """Return when each key's effect was last recorded in the group's window, as schema.SEEN."""
    asked = checked_keys(columns_of(keys, schema.IDEMPOTENCY_KEY)["idempotency_key"])
    known = engine.state.group(group)
    engine.dispatched(engine.state.changed(Kind.EFFECT, known.group_id))
    after_ms = engine.clock.now_ms() - known.idempotency_window_ms
    seen = engine.database.effects_seen(known.group_id, keys=asked, after_ms=after_ms)
    return pa.table([asked, seen], schema=schema.SEEN)
