"""Reading messages from the commit log, or from segments if their log file was dropped."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.errors import OperatorError
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.log.commit_log import CommitLog
from rmq_pipeline.store.segment_reader import Segments

#: Average run length from which adjacent rows are sliced instead of copied.
RUN_ROWS = 16


def segments_of(engine: Engine) -> Segments:
    """Return the registered segments; load them after a start and after a failed seal."""
    segments = engine.segments
    if not segments.loaded:
        # Otherwise a registration during the load would be lost.
        with segments.changing:
            engine.dispatched(engine.state.changed(Kind.SEGMENT, 0))
            segments.load(engine.database.load_segments())
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
