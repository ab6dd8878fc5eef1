"""The part of a transaction outside the writer: checking, reading and copying half messages."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline import limits, schema, transaction
from rmq_pipeline.admission import admit
from rmq_pipeline.broker.decide.publish import Send, checked
from rmq_pipeline.broker.decide.transaction import EndHalves, FindHalves, SendHalf
from rmq_pipeline.broker.state.halves import Rows
from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.work.chunks import sizes
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import fetch
from rmq_pipeline.broker.work.unreadable import Stored
from rmq_pipeline.errors import (
    IllegalConsumerGroupError,
    MessageBodyTooLargeError,
    TransactionEndedError,
    TransactionError,
    TransactionNotFoundError,
)
from rmq_pipeline.group import check_name
from rmq_pipeline.message import TRANSACTION_ID, Int64s, hash64, with_properties
from rmq_pipeline.store.events import Kind
from rmq_pipeline.tables import columns_of, contiguous
from rmq_pipeline.topic import HALF_TOPIC_ID

Mask = npt.NDArray[np.bool_]

COPIED: Final = ("message_id", "tag", "keys", "message_group", "properties", "body", "born_at_ms")
_COMMIT, _ROLLBACK, _UNKNOWN = range(len(transaction.RESOLUTIONS))
#: Names of stored ends.
_NAMES: Final = {
    int(Kind.HALF_COMMITTED): transaction.COMMIT,
    int(Kind.HALF_ROLLED_BACK): transaction.ROLLBACK,
    int(Kind.HALF_GIVEN_UP): transaction.GIVEN_UP,
}


def end_transactions(
    engine: Engine,
    resolutions: pa.Table,
    *,
    producer_group: str | None,
    window: tuple[str, int] | None,
) -> pa.Table:
    """End transactions as in schema.RESOLUTION; return schema.ENDED, one row for each.

    Raises:
        FencedError: a newer epoch has opened the window.
        TransactionNotFoundError, TransactionEndedError, TransactionError: nothing was ended.
    """
    columns = columns_of(resolutions, schema.RESOLUTION)
    ids, codes = columns["transaction_id"], transaction.codes(columns["resolution"])
    if not len(ids):
        return schema.ENDED.empty_table()
    if len(ids) > limits.BATCH_ROWS:
        raise MessageBodyTooLargeError(
            f"The call ends {len(ids)} transactions.",
            remedy=f"End at most {limits.BATCH_ROWS} in one call.",
        )
    offsets, hashes = transaction.decode(ids)
    asked = _Asked.of(offsets, hashes, codes=codes)
    while True:
        ended = _end_open(engine, asked, producer_group=producer_group, window=window)
        if ended is not None:
            return asked.answer(ids, ended)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Distinct transactions of a request, in its order."""

    queue_offset: Int64s
    message_id_hash: Int64s
    code: Int64s
    #: For each row of the request: the index of its transaction, and True for the first such row.
    of_row: npt.NDArray[np.intp]
    first: Mask

    @classmethod
    def of(cls, offsets: Int64s, hashes: Int64s, *, codes: Int64s) -> "_Asked":
        """Combine the rows of each transaction.

        Raises:
            TransactionEndedError: two rows end one transaction differently.
            TransactionNotFoundError: two rows give one offset different hashes.
        """
        # A row with "unknown" decides nothing, so another row of the transaction takes precedence.
        order = np.lexsort((np.arange(len(offsets)), codes == _UNKNOWN, offsets))
        _, starts, of_sorted = np.unique(offsets[order], return_index=True, return_inverse=True)
        deciding = np.sort(order[starts])
        rank = np.empty(len(starts), dtype=np.intp)
        rank[np.argsort(order[starts])] = np.arange(len(starts))
        of_row = np.empty(len(offsets), dtype=np.intp)
        of_row[order] = rank[of_sorted]
        if np.any(hashes != hashes[deciding][of_row]):
            row = int(np.argmax(hashes != hashes[deciding][of_row]))
            raise TransactionNotFoundError(f"Row {row}: there is no such transaction.")
        differs = (codes != _UNKNOWN) & (codes != codes[deciding][of_row])
        if differs.any():
            row = int(np.argmax(differs))
            raise TransactionEndedError(
                f"Row {row} ends a transaction differently from another row.",
                remedy="No transaction was ended. Give one end for each transaction.",
            )
        first = np.zeros(len(offsets), dtype=np.bool_)
        first[deciding] = True
        return cls(offsets[deciding], hashes[deciding], codes[deciding], of_row, first)

    def row(self, which: int) -> int:
        """Return the row of the request that an error names."""
        return int(np.argmax(self.of_row == which))

    def answer(self, ids: pa.Array, ended: "_Ended") -> pa.Table:
        """Return the answer as schema.ENDED."""
        names = ended.names.take(pa.array(self.of_row))
        first = ended.first_time[self.of_row] & self.first
        return pa.Table.from_arrays([ids, names, pa.array(first)], schema=schema.ENDED)


@dataclass(frozen=True, slots=True)
class _Ended:
    """End of each transaction, and True if this request stored it."""

    names: pa.Array
    first_time: Mask


def _end_open(
    engine: Engine,
    asked: _Asked,
    *,
    producer_group: str | None,
    window: tuple[str, int] | None,
) -> _Ended | None:
    """End the open transactions; return None if another request has just ended one of them."""
    question = FindHalves(asked.queue_offset, asked.message_id_hash, window)
    rows, is_open, producers = engine.submit(question)
    groups = np.full(len(asked.code), None, dtype=object)
    for name, of_group in producers.items():
        groups[np.flatnonzero(is_open)[of_group]] = name
    names = pa.array(transaction.RESOLUTIONS).take(pa.array(asked.code))
    if not is_open.all():
        names, of_ended = _ended_before(engine, asked, is_open=is_open, names=names)
        groups[~is_open] = of_ended
    if producer_group is not None and np.any(groups != producer_group):
        which = int(np.argmax(groups != producer_group))
        raise TransactionError(
            f"Row {asked.row(which)}: the transaction is of producer group {groups[which]},"
            f" not {producer_group}.",
            remedy="End it as the producer group that began it.",
        )
    decided = asked.code[is_open] != _UNKNOWN
    first_time = is_open & (asked.code != _UNKNOWN)
    if decided.any():
        committed = asked.code[is_open][decided] == _COMMIT
        rows = rows[decided]
        request = EndHalves(rows, committed, copies(engine, rows[committed]), window)
        if not engine.submit(request):
            return None
    return _Ended(names, first_time)


def _ended_before(
    engine: Engine, asked: _Asked, *, is_open: Mask, names: pa.Array
) -> tuple[pa.Array, npt.NDArray[np.object_]]:
    """Return the resolutions, including those of earlier ends, and the producer groups of these.

    Raises:
        TransactionNotFoundError: a transaction was never begun.
        TransactionEndedError: a transaction has the other end already.
    """
    closed = np.flatnonzero(~is_open)
    stored = engine.database.ended_halves(asked.queue_offset[closed])
    if stored.num_rows < len(closed):  # ended a moment ago, or never begun
        engine.dispatched()
        stored = engine.database.ended_halves(asked.queue_offset[closed])
    offsets = stored.column("queue_offset").to_numpy()
    order = np.argsort(offsets)
    at = np.searchsorted(offsets, asked.queue_offset[closed], sorter=order)
    known = at < len(offsets)
    rows = order[at[known]]
    found = stored.take(pa.array(rows))
    known[known] = (offsets[rows] == asked.queue_offset[closed][known]) & (
        found.column("message_id_hash").to_numpy() == asked.message_id_hash[closed][known]
    )
    if not known.all():
        row = asked.row(int(closed[np.argmin(known)]))
        raise TransactionNotFoundError(f"Row {row}: there is no such transaction.")
    resolutions = [_NAMES[kind] for kind in found.column("resolution").to_pylist()]
    said = names.to_numpy(zero_copy_only=False).astype(object)
    differs = (asked.code[closed] != _UNKNOWN) & (said[closed] != np.array(resolutions, object))
    if differs.any():
        which = int(np.argmax(differs))
        raise TransactionEndedError(
            f"Row {asked.row(int(closed[which]))}: the transaction was ended with"
            f" {resolutions[which]}, not {said[closed[which]]}."
        )
    said[closed] = resolutions
    groups = found.column("producer_group").to_numpy(zero_copy_only=False)
    return pa.array(said, pa.string()), groups


def read_halves(engine: Engine, rows: Rows, *, columns: tuple[str, ...]) -> pa.Table:
    """Return the half messages in this order."""
    return fetch(
        engine,
        Places(rows["position"].astype(np.int64), rows["row"].astype(np.int32)),
        columns=columns,
        topic_id=HALF_TOPIC_ID,
        queue_id=np.zeros(len(rows), dtype=np.int32),
        offset=rows["queue_offset"].astype(np.int64),
    )


def stored_halves(rows: Rows) -> Stored:
    """Return the places of half messages."""
    return Stored(
        HALF_TOPIC_ID,
        np.zeros(len(rows), dtype=np.int32),
        rows["queue_offset"].astype(np.int64),
        Places(rows["position"].astype(np.int64), rows["row"].astype(np.int32)),
    )


def half_sizes(engine: Engine, rows: Rows, **how: int) -> Int64s:
    """Return the size of each half message in bytes without reading it.

    The arguments ``how`` are those of ``sizes``.
    """
    return sizes(
        engine,
        Places(rows["position"].astype(np.int64), rows["row"].astype(np.int32)),
        topic_id=HALF_TOPIC_ID,
        queue_id=np.zeros(len(rows), dtype=np.int32),
        offset=rows["queue_offset"].astype(np.int64),
        **how,
    )


def copies(engine: Engine, rows: Rows) -> tuple[Send, ...]:
    """Return the sends that copy committed half messages, one for each topic that still exists.

    Raises:
        MessageBodyTooLargeError: they exceed limits.BATCH_BYTES.
    """
    if not len(rows):
        return ()
    if len(rows) * limits.BODY_BYTES > limits.BATCH_BYTES:
        total = int(half_sizes(engine, rows).sum())
        if total > limits.BATCH_BYTES:  # an upper bound; count exactly before refusing
            total = int(half_sizes(engine, rows, near_bytes=0).sum())
        if total > limits.BATCH_BYTES:
            raise MessageBodyTooLargeError(
                f"Transactions of {total} bytes at once.",
                remedy=f"End half messages of {limits.BATCH_BYTES} bytes at a time at most.",
            )
    messages = read_halves(engine, rows, columns=COPIED)
    sends = []
    for topic_id in np.unique(rows["target_topic_id"]).tolist():
        target = engine.state.topics.get(topic_id)
        if target is None:
            continue
        at = np.flatnonzero(rows["target_topic_id"] == topic_id)
        part = messages if len(at) == len(rows) else messages.take(pa.array(at))
        columns = plain_columns(part)
        ids = transaction.encode(
            rows["queue_offset"][at].astype(np.int64), rows["message_id_hash"][at].astype(np.int64)
        )
        columns["properties"] = with_properties(columns["properties"], {TRANSACTION_ID: ids})
        sends.append(
            checked(
                target.topic,
                columns,
                ids=engine.ids,
                delay_max_ms=engine.settings.delay_max_ms,
                now_ms=engine.clock.now_ms(),
            )
        )
    return tuple(sends)


def plain_columns(messages: pa.Table) -> dict[str, pa.Array]:
    """Return the columns of a send without a delay."""
    columns = {name: contiguous(messages.column(name)) for name in COPIED}
    columns["delay_level"] = pa.nulls(len(messages), pa.int32())
    columns["deliver_at_ms"] = pa.nulls(len(messages), pa.int64())
    return columns


def prepare(
    engine: Engine,
    topic: str,
    *,
    messages: pa.Table,
    producer_group: str,
    immunity_ms: int,
) -> SendHalf:
    """Check half messages for a topic; accept or refuse them as a whole.

    Raises:
        RequestError: names the row and its fault.
    """
    check_producer_group(producer_group)
    columns = columns_of(messages, schema.SEND)
    target = engine.state.topic(topic).topic
    admit(target, columns, half=True)
    send = checked(
        engine.state.topics[HALF_TOPIC_ID].topic,
        columns,
        ids=engine.ids,
        delay_max_ms=engine.settings.delay_max_ms,
        now_ms=engine.clock.now_ms(),
    )
    return SendHalf(
        topic=topic,
        topic_id=target.topic_id,
        send=send,
        message_id_hash=hash64(send.columns["message_id"]),
        producer_group=producer_group,
        immunity_ms=immunity_ms,
    )


def check_producer_group(name: str) -> None:
    """Check the name of a producer group.

    Raises:
        TransactionError: it breaks the rules for names of consumer groups.
    """
    try:
        check_name(name)
    except IllegalConsumerGroupError as error:
        text = f"The producer group is invalid. {error.message}"
        raise TransactionError(text, remedy=error.remedy) from error
