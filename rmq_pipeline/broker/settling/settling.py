"""The work of a settle outside the writer: reading receipts and tables, burying, answering."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rmq_pipeline import receipt, schema
from rmq_pipeline.broker import arguments
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.failures.burying import bury
from rmq_pipeline.broker.sending.publish import prepare
from rmq_pipeline.broker.settling.outcomes import DEAD_LETTER, Outcomes, acks, outcomes_of
from rmq_pipeline.broker.settling.replacing import described_files
from rmq_pipeline.broker.settling.settle import ChangeInvisible, Settle, Settled
from rmq_pipeline.errors import RequestError, TableSchemaError
from rmq_pipeline.failure import Failure
from rmq_pipeline.message import hash64
from rmq_pipeline.receipt import Receipts
from rmq_pipeline.tables import columns_of, contiguous

_RESERVED = ("message_group", "message_group_hash", "removed")


def receipts_of(given: pa.Table | Sequence[str]) -> Receipts:
    """Receipts from a table with a column receipt_handle, or from handles.

    Raises:
        TableSchemaError: there is no such column.
        ReceiptHandleError: one is not a receipt handle.
    """
    if isinstance(given, pa.Table):
        if "receipt_handle" not in given.column_names:
            raise TableSchemaError("Column receipt_handle is missing.")
        return receipt.decode(given.column("receipt_handle"))
    if isinstance(given, str):
        given = [given]
    return receipt.decode(pa.array(list(given), pa.string()))


def ack(engine: Engine, given: pa.Table | Sequence[str]) -> None:
    """Settle deliveries as done."""
    receipts = receipts_of(given)
    if len(receipts):
        engine.submit(Settle(acks(receipts)))


def change_invisible_duration(
    engine: Engine, given: pa.Table | Sequence[str], *, duration_ms: int
) -> pa.Table:
    """New ends for leases, and the receipts that go with them."""
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
    """Settle deliveries as hopeless and bury them.

    Args:
        keep_behind: what is leased behind them in their message groups stays leased.
    """
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
    _settle(engine, Settle(outcomes, keep_behind=keep_behind))


def _settle(engine: Engine, request: Settle) -> Settled:
    settled: Settled = engine.submit(request)
    if settled.doomed:
        bury(engine, settled.doomed)
    return settled


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
    """Everything a step of a consumer does, in one frame."""
    columns = columns_of(outcomes, schema.OUTCOME)
    receipts = receipt.decode(columns["receipt_handle"])
    now_ms = engine.clock.now_ms()
    if publish:
        engine.admit()
    sends = [
        prepare(
            engine.state.topic(name).topic,
            messages,
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
        window=(window[0], int(window[1])) if window is not None else None,
        settle_id=settle_id,
        publish=tuple(sends),
        sink_files=_sink_files(sink_files),
        keyed_state=_state_batch(engine, group, topic=topic, table=state)
        if state is not None
        else None,
    )
    return _settle(engine, request).counts()


def _sink_files(files: pa.Table | None) -> tuple[str, ...]:
    return tuple(json.dumps(row) for row in described_files(files))


def _state_batch(
    engine: Engine, group: str, *, topic: str, table: pa.Table
) -> pa.RecordBatch | None:
    """Keyed state as the log keeps it: message_group, its hash, removed, the consumer's columns."""
    if not topic:
        raise RequestError("State needs the topic whose messages it belongs to.")
    group_id = engine.state.group(group).group_id
    topic_id = engine.state.topic(topic).topic.topic_id
    if "message_group" not in table.column_names:
        raise TableSchemaError("Column message_group is missing in the state.")
    if not table.num_rows:
        return None
    table = table.combine_chunks()
    keys = contiguous(table.column("message_group").cast(pa.string()))
    if keys.null_count:
        raise TableSchemaError("Column message_group of the state has a null.")
    removed = pa.repeat(pa.scalar(False), len(keys))
    if "removed" in table.column_names:
        removed = table.column("removed").cast(pa.bool_()).fill_null(False)
    own = [name for name in table.column_names if name not in _RESERVED]
    whole = pa.table(
        {
            "message_group": keys,
            "message_group_hash": pa.array(hash64(keys)),
            "removed": removed,
            **{name: table.column(name) for name in own},
        }
    )
    ids = {b"group_id": str(group_id).encode(), b"topic_id": str(topic_id).encode()}
    return whole.replace_schema_metadata(ids).combine_chunks().to_batches()[0]
