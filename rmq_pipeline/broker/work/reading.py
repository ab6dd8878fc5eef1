"""Reading messages: their places from the read-ahead or DuckDB, their rows from log or segments."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline import receipt, schema
from rmq_pipeline.broker.decide.deliver import Delivery, receipts_of
from rmq_pipeline.broker.decide.queue_index import FindPlaces, FindUndispatched
from rmq_pipeline.broker.decide.request import CheckFence
from rmq_pipeline.broker.decide.scan import Taken
from rmq_pipeline.broker.decide.sent import Sent
from rmq_pipeline.broker.decide.settle import Mask
from rmq_pipeline.broker.state.consumption import QueueKey
from rmq_pipeline.broker.state.queue_index import IndexRows, Places
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.errors import OperatorError, RocketMQError, StorageError
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.log.commit_log import CommitLog
from rmq_pipeline.store.segment_reader import Segments
from rmq_pipeline.tables import numbers
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID

#: Offsets further apart than this are looked up one by one.
_GAP = 4096
#: Average run length from which adjacent rows are sliced instead of copied.
RUN_ROWS = 16
_Found = TypeVar("_Found")
#: Most times a read is repeated because the log was replaced. Once is enough unless writes keep
#: failing.
_LOGS: Final = 3


def held(engine: Engine, *, topic_id: int, queue_id: Int32s, offset: Int64s) -> Places:
    """Return places from the read-ahead; position -1 for messages that DuckDB has.

    Scheduled and half messages are in memory only while they wait. For the others, wait until
    DuckDB has them.
    """
    places: Places = engine.submit(FindPlaces(topic_id, queue_id, offset))
    if np.any(places.position < 0):
        engine.dispatched(engine.state.changed(Kind.TOPIC, topic_id))
    return places


def undispatched(engine: Engine, key: QueueKey, *, stop: int) -> IndexRows:
    """Return a queue's rows before offset ``stop`` that DuckDB may lack.

    DuckDB has all earlier rows.
    """
    rows: IndexRows = engine.submit(FindUndispatched(key, engine.database.dispatched, stop))
    return rows


def ends_at(engine: Engine, *, topic_id: int, bounds: list[tuple[int, int]]) -> int:
    """Return the log position of the last message of a topic; -1 if DuckDB has all of them.

    Args:
        bounds: min_offset and max_offset of each queue.
    """
    last = np.array([high - 1 for _, high in bounds], dtype=np.int64)
    places = held(
        engine, topic_id=topic_id, queue_id=np.arange(len(last), dtype=np.int32), offset=last
    )
    return int(places.position.max(initial=-1))


def locate(
    engine: Engine, *, topic_id: int, queue_id: Int32s, offset: Int64s, places: Places
) -> Places:
    """Return the places, with those that the read-ahead lacked filled in from DuckDB.

    Raises:
        LookupError: a message has expired.
    """
    unknown = np.flatnonzero(places.position < 0)
    if not len(unknown):
        return places
    position, row = places.position.copy(), places.row.copy()
    for queue in np.unique(queue_id[unknown]).tolist():
        rows = unknown[queue_id[unknown] == queue]
        for part in _near_each_other(offset, rows):
            first, last = int(offset[part[0]]), int(offset[part[-1]])
            page = engine.database.index(topic_id, queue, start=first, stop=last + 1)
            if page.base != first or not len(page.position):
                raise LookupError(f"Offset {first} of queue {queue} has expired.")
            at = offset[part] - page.base
            position[part], row[part] = page.position[at], page.row[at]
    return Places(position, row)


def places_of(engine: Engine, *, topic_id: int, queue_id: Int32s, offset: Int64s) -> Places:
    """Return the places of messages, from the read-ahead or DuckDB.

    Raises:
        LookupError: a message has expired.
    """
    known = held(engine, topic_id=topic_id, queue_id=queue_id, offset=offset)
    return locate(engine, topic_id=topic_id, queue_id=queue_id, offset=offset, places=known)


def tags_of(engine: Engine, key: QueueKey, *, offset: Int64s) -> Int64s:
    """Return the tag hashes of messages anywhere in a queue."""
    tags = np.zeros(len(offset), dtype=np.int64)
    rest = undispatched(engine, key, stop=int(offset.max(initial=-1)) + 1)
    new = offset >= rest.base
    tags[new] = rest.tag_hash[offset[new] - rest.base]
    for part in _near_each_other(offset, np.flatnonzero(~new)):
        first, last = int(offset[part[0]]), int(offset[part[-1]])
        page = engine.database.index(key.topic_id, key.queue_id, start=first, stop=last + 1)
        tags[part] = page.tag_hash[offset[part] - page.base]
    return tags


def _near_each_other(offset: Int64s, rows: npt.NDArray[np.intp]) -> list[npt.NDArray[np.intp]]:
    """Return the rows by offset, split where the next one is further away than _GAP."""
    if not len(rows):
        return []
    rows = rows[np.argsort(offset[rows], kind="stable")]
    return np.split(rows, np.flatnonzero(np.diff(offset[rows]) > _GAP) + 1)


def segments_of(engine: Engine) -> Segments:
    """Return the registered segments; load them after a start and after a failed seal."""
    segments = engine.segments
    if not segments.loaded:
        # Otherwise a registration during the load would be lost.
        with segments.changing:
            outdated = segments.outdated
            engine.dispatched(engine.state.changed(Kind.SEGMENT, 0))
            segments.load(engine.database.load_segments(), outdated=outdated)
    return segments


@contextmanager
def registering(segments: Segments) -> Iterator[None]:
    """Mark the segments for reloading if the registration inside fails.

    A refusal changes nothing. After a failed write it is unknown what was registered.
    """
    try:
        yield
    except OperatorError:
        segments.loaded = segments.tidy = False
        raise


def fetch(
    engine: Engine,
    places: Places,
    *,
    columns: Sequence[str],
    topic_id: int,
    queue_id: Int32s,
    offset: Int64s,
) -> pa.Table:
    """Return the messages at these places, in this order; ``columns`` of schema.MESSAGE.

    Args:
        places: in the log, as they were written.
        queue_id: of each message; with ``offset`` it finds messages dropped from the log.

    Raises:
        LookupError: a message is neither in the log nor in a segment.
    """
    log = engine.log
    try:
        return _fetch_logged(log, places, columns=columns)
    except LookupError:
        gone = places.position < log.first
        if not gone.any():
            raise
    there, rows = np.flatnonzero(~gone), np.flatnonzero(gone)
    parts, order = [], [there]
    if len(there):
        # Through this function again, because another log file may be dropped meanwhile.
        left = Places(places.position[there], places.row[there])
        part = fetch(
            engine,
            left,
            columns=columns,
            topic_id=topic_id,
            queue_id=queue_id[there],
            offset=offset[there],
        )
        parts.append(part)
    for queue in np.unique(queue_id[rows]).tolist():
        here = rows[queue_id[rows] == queue]
        part = segments_of(engine).read(topic_id, queue, offsets=offset[here], columns=columns)
        parts.append(part)
        order.append(here)
    return _in_order(parts, np.concatenate(order))


def _in_order(parts: list[pa.Table], order: Int64s) -> pa.Table:
    table = pa.concat_tables(parts)
    if np.all(order[1:] > order[:-1]):
        return table
    back = np.empty(len(order), dtype=np.int64)
    back[order] = np.arange(len(order))
    return table.combine_chunks().take(pa.array(back))


def _fetch_logged(commit_log: CommitLog, places: Places, *, columns: Sequence[str]) -> pa.Table:
    """Return the messages at these places, in this order; ``columns`` of schema.MESSAGE."""
    runs = _runs(places)
    if (len(runs) - 1) * RUN_ROWS <= len(places) or len(places) == 1:
        return _fetch_runs(commit_log, places, runs=runs, columns=columns)
    positions = np.unique(places.position)
    if len(positions) == 1:
        batch = commit_log.read(int(positions[0])).batch.select(list(columns))
        return pa.Table.from_batches([_rows(batch, places.row)])
    parts, order = [], []
    for position in positions.tolist():
        here = np.flatnonzero(places.position == position) if len(positions) < 64 else None
        if here is None:
            return _fetch_many(commit_log, places, columns=columns)
        batch = commit_log.read(position).batch.select(list(columns))
        parts.append(_rows(batch, places.row[here]))
        order.append(here)
    return _in_order([pa.Table.from_batches(parts)], np.concatenate(order))


def _runs(places: Places) -> list[int]:
    """Return the starts of all runs of adjacent rows, and the end of the last one."""
    position, row = places.position, places.row
    cuts = np.flatnonzero((position[1:] != position[:-1]) | (row[1:] != row[:-1] + 1)) + 1
    return [0, *cuts.tolist(), len(row)]


def _fetch_runs(
    commit_log: CommitLog, places: Places, *, runs: list[int], columns: Sequence[str]
) -> pa.Table:
    names = list(columns)
    position, row = places.position[runs[:-1]].tolist(), places.row[runs[:-1]].tolist()
    sections = {at: commit_log.read(at).batch.select(names) for at in dict.fromkeys(position)}
    lengths = np.diff(runs).tolist()
    return pa.Table.from_batches(
        [
            sections[at].slice(first, length)
            for at, first, length in zip(position, row, lengths, strict=True)
        ]
    )


def _fetch_many(commit_log: CommitLog, places: Places, *, columns: Sequence[str]) -> pa.Table:
    order = np.argsort(places.position, kind="stable")
    position = places.position[order]
    row = places.row[order]
    starts = np.flatnonzero(np.concatenate(([True], position[1:] != position[:-1])))
    bounds = [*starts.tolist(), len(order)]
    names = list(columns)
    parts = []
    for start, stop in itertools.pairwise(bounds):
        batch = commit_log.read(int(position[start])).batch.select(names)
        parts.append(_rows(batch, row[start:stop]))
    return _in_order([pa.Table.from_batches(parts)], order)


def _rows(batch: pa.RecordBatch, rows: Int32s) -> pa.RecordBatch:
    n = len(rows)
    first = int(rows[0])
    if int(rows[-1]) - first == n - 1 and (n < 3 or np.all(np.diff(rows) == 1)):
        return batch.slice(first, n)
    return batch.take(pa.array(rows))


def part_of(delivery: Delivery, chosen: Mask) -> Delivery:
    """Return the chosen messages of a delivery, in their order."""
    taken, done = [], 0
    for queue_id, some in delivery.taken:
        rows = chosen[done : done + len(some)]
        done += len(some)
        if rows.any():
            part = Taken(*(getattr(some, field.name)[rows] for field in fields(Taken)))
            taken.append((queue_id, part))
    return replace(delivery, taken=taken)


def delivered(engine: Engine, delivery: Delivery) -> pa.Table:
    """Return the leased messages as schema.RECEIVED."""
    receipts = receipts_of(delivery)
    queue_id, offset = receipts.queue_id, receipts.queue_offset
    attempt = np.concatenate([taken.attempt for _, taken in delivery.taken])
    places = Places(
        np.concatenate([taken.position for _, taken in delivery.taken]),
        np.concatenate([taken.row for _, taken in delivery.taken]),
    )
    places = locate(
        engine, topic_id=delivery.topic_id, queue_id=queue_id, offset=offset, places=places
    )
    handles = receipt.encode(receipts)
    table = fetch(
        engine,
        places,
        columns=schema.READ.names,
        topic_id=delivery.topic_id,
        queue_id=queue_id,
        offset=offset,
    )
    # Quicker than a table of all columns: those of the messages are wrapped already.
    for name, column in (("delivery_attempt", numbers(attempt)), ("receipt_handle", handles)):
        table = table.append_column(schema.RECEIVED.field(name), column)
    return table


def whatever_log(engine: Engine, read: Callable[[], _Found]) -> _Found:
    """Return the result of ``read``; repeat it if the log was closed meanwhile.

    The writer closes and reopens the log after any failed write, which breaks concurrent reads.

    Raises:
        StorageError, LookupError: raised by ``read`` for another reason.
    """
    for _ in range(_LOGS):
        before = engine.log
        try:
            return read()
        except (StorageError, LookupError):
            if not has_another_log(engine, before):
                raise
    return read()


def has_another_log(engine: Engine, before: CommitLog) -> bool:
    """Return True if the log was replaced since, or will be after the current failed write."""
    if engine.log is before:
        with suppress(RocketMQError):  # it may fail with the log, after which the log is replaced
            engine.submit(CheckFence())  # it is answered once the log works
    return engine.log is not before


def name_first(engine: Engine, sent: Sent) -> Sent:
    """Return the answer with the ids of the stored messages in place of the repetitions' own."""
    if sent.unnamed is None or sent.later is None:
        return sent
    rows = np.flatnonzero(sent.unnamed)
    ids = np.empty(len(rows), dtype=object)
    for topic_id, scheduled in ((sent.topic_id, False), (SCHEDULE_TOPIC_ID, True)):
        here = np.flatnonzero(sent.later[rows] == scheduled)
        if len(here):
            at = rows[here]
            ids[here] = _ids_at(engine, topic_id, sent=sent, rows=at)
    return sent.named(pa.array(ids, pa.string()))


def _ids_at(engine: Engine, topic_id: int, *, sent: Sent, rows: Int64s) -> list[str]:
    queue_id, offset = sent.queue_id[rows], sent.queue_offset[rows]
    places = places_of(engine, topic_id=topic_id, queue_id=queue_id, offset=offset)
    found = fetch(
        engine,
        places,
        columns=("message_id",),
        topic_id=topic_id,
        queue_id=queue_id,
        offset=offset,
    )
    ids: list[str] = found.column("message_id").to_pylist()
    return ids
