"""Log rows as the Arrow tables that dispatch passes to DuckDB. Bodies are not read."""

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import schema
from rmq_pipeline.message import hash64
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.log.stretch import Rows

_MESSAGE_COLUMNS: Final = [
    name for name in schema.MESSAGE.names if name not in ("body", "properties")
]
_DEAD_LETTER_COLUMNS: Final = ["topic_id", "queue_id", "queue_offset", "properties", "stored_at_ms"]
#: Batches with fewer rows on average are combined, because DuckDB has a fixed cost per batch.
_SMALL_ROWS: Final = 1024


def messages(found: Sequence[Rows]) -> tuple[pa.Table, pa.Table]:
    """Return the columns of the consume queue, and those that give the origin of dead letters."""
    table = pa.Table.from_batches([rows.batch for rows in found])
    kept = _placed(_compact(table.select(_MESSAGE_COLUMNS)), found)
    tag_hash = pa.array(hash64(_one_array(kept.column("tag"))))
    return kept.append_column("tag_hash", tag_hash), table.select(_DEAD_LETTER_COLUMNS)


def dead_letters(table: pa.Table, topic_ids: pa.Array) -> pa.Table:
    """Return the rows of dead letter topics."""
    return table.filter(pc.is_in(table.column("topic_id"), value_set=topic_ids))


def events(found: Sequence[Rows]) -> pa.Table:
    """Return the events with their log positions and ``seq``, their order."""
    table = pa.Table.from_batches([rows.batch for rows in found])
    placed = _placed(_compact(table), found)
    return placed.append_column("seq", pa.array(np.arange(placed.num_rows)))


def kinds_of(table: pa.Table) -> frozenset[int]:
    """Return the event kinds that occur."""
    return frozenset(pc.unique(table.column("kind")).to_pylist())


def runs_between_resets(table: pa.Table) -> list[pa.Table]:
    """Split the events, in order, into runs that contain only RESET or no RESET."""
    is_reset = _one_array(pc.equal(table.column("kind"), int(Kind.RESET))).to_numpy(
        zero_copy_only=False
    )
    cuts = np.flatnonzero(np.diff(is_reset)) + 1
    bounds = [0, *cuts.tolist(), table.num_rows]
    return [table.slice(start, stop - start) for start, stop in itertools.pairwise(bounds)]


def state_runs(found: Sequence[Rows]) -> list[tuple[int, int, pa.Table]]:
    """Return keyed state as (group_id, topic_id, rows in order), with one schema per run."""
    runs: dict[tuple[int, int], list[list[pa.RecordBatch]]] = {}
    for _, batch, *_ in found:
        metadata = batch.schema.metadata
        key = (int(metadata[b"group_id"]), int(metadata[b"topic_id"]))
        of_key = runs.setdefault(key, [])
        if of_key and of_key[-1][0].schema.equals(batch.schema):
            of_key[-1].append(batch)
        else:
            of_key.append([batch])
    return [
        (group_id, topic_id, _ordered(pa.Table.from_batches(run)))
        for (group_id, topic_id), of_key in runs.items()
        for run in of_key
    ]


def holds(table: pa.Table, column: str, *, value: int) -> bool:
    """Return True if a column contains a value."""
    return bool(pc.any(pc.equal(table.column(column), value)).as_py())


def of_kinds(events: pa.Table, kinds: frozenset[int]) -> pa.Table:
    """Return the events of these kinds."""
    return events.filter(pc.is_in(events.column("kind"), pa.array(sorted(kinds), pa.int16())))


def largest(table: pa.Table, column: str) -> int:
    """Return the largest value of a column; 0 if there is none."""
    return int(pc.max(table.column(column)).as_py() or 0)


def _ordered(table: pa.Table) -> pa.Table:
    return table.append_column("staged_order", pa.array(np.arange(table.num_rows)))


def _compact(table: pa.Table) -> pa.Table:
    chunks = table.column(0).num_chunks
    return table.combine_chunks() if table.num_rows < chunks * _SMALL_ROWS else table


def _placed(table: pa.Table, found: Sequence[Rows]) -> pa.Table:
    """Append the position of each row's section, and the row's number there."""
    counts = np.array([count for rows in found for count in rows.counts])
    positions = np.array([position for rows in found for position in rows.positions])
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    rows = (np.arange(len(starts)) - starts).astype(np.int32)
    placed = table.append_column("position", pa.array(np.repeat(positions, counts)))
    return placed.append_column("row", pa.array(rows))


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
