"""Reading messages at their places in the commit log."""

import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.commit_log import CommitLog

#: Average run length from which adjacent rows are sliced instead of copied.
RUN_ROWS = 16


def fetch(commit_log: CommitLog, places: Places, *, columns: Sequence[str]) -> pa.Table:
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
    return _in_order(parts, np.concatenate(order))


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
    return _in_order(parts, order)


def _in_order(parts: list[pa.RecordBatch], order: Int64s) -> pa.Table:
    table = pa.Table.from_batches(parts)
    if np.all(order[1:] > order[:-1]):
        return table
    back = np.empty(len(order), dtype=np.int64)
    back[order] = np.arange(len(order))
    return table.combine_chunks().take(pa.array(back))


def _rows(batch: pa.RecordBatch, rows: Int32s) -> pa.RecordBatch:
    n = len(rows)
    first = int(rows[0])
    if int(rows[-1]) - first == n - 1 and (n < 3 or np.all(np.diff(rows) == 1)):
        return batch.slice(first, n)
    return batch.take(pa.array(rows))
