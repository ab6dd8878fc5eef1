"""Finding messages by key, id or time: by index in segments, with DuckDB in the log.

The search takes the first ``limit`` matches of each queue, and sorts all of them by stored_at_ms.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits, schema
from rmq_pipeline.broker.decide.group_offsets import Offsets
from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.queries import span_of
from rmq_pipeline.broker.work.reading import ends_at, fetch, locate, segments_of
from rmq_pipeline.errors import RequestError
from rmq_pipeline.message import Int64s
from rmq_pipeline.store.consume_queue import Search
from rmq_pipeline.topic import Topic

_ORDER: Final = [(name, "ascending") for name in ("stored_at_ms", "queue_id", "queue_offset")]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Search conditions; None: no condition."""

    key: str | None
    message_id: str | None
    #: Range of stored_at_ms: [from_ms, to_ms).
    from_ms: int | None
    to_ms: int | None
    limit: int
    with_body: bool

    def check(self) -> None:
        """Check the conditions.

        Raises:
            RequestError: there is no condition, or limit is out of range.
        """
        asked = (self.key, self.message_id, self.from_ms, self.to_ms)
        if all(each is None for each in asked):
            raise RequestError("Say what to find: key, message_id, from_ms or to_ms.")
        if not 0 <= self.limit <= limits.FIND_ROWS:
            raise RequestError(f"limit must be 0 to {limits.FIND_ROWS}, not {self.limit!r}.")

    def columns(self) -> list[str]:
        """Return the columns to read of a segment."""
        without = {"queue_id"} if self.with_body else {"queue_id", "body"}
        return [name for name in schema.READ.names if name not in without]

    def matches(self, rows: pa.Table) -> pa.Array:
        """Return the mask of matching rows."""
        found = pa.array(np.ones(rows.num_rows, dtype=np.bool_))
        if self.message_id is not None:
            found = pc.and_(found, pc.equal(rows["message_id"], self.message_id))
        if self.from_ms is not None:
            found = pc.and_(found, pc.greater_equal(rows["stored_at_ms"], self.from_ms))
        if self.to_ms is not None:
            found = pc.and_(found, pc.less(rows["stored_at_ms"], self.to_ms))
        if self.key is not None:
            found = pc.and_(found, _has_key(rows["keys"].combine_chunks(), self.key))
        return found


def find(engine: Engine, topic: str, *, wanted: Wanted) -> pa.Table:
    """Return the first matching messages of a topic, in the order of storing.

    Returns:
        schema.READ; body is null unless requested.
    """
    wanted.check()
    described: Topic
    bounds: list[tuple[int, int]]
    described, bounds = engine.submit(Offsets(topic))
    parts = [schema.READ.empty_table()]
    topic_id = described.topic_id
    engine.dispatched(ends_at(engine, topic_id=topic_id, bounds=bounds))
    for queue_id, (low, high) in enumerate(bounds):
        from_ms = wanted.from_ms if wanted.from_ms is not None else 0
        start, _ = span_of(engine, topic_id, queue_id=queue_id, at_ms=from_ms, bounds=(low, high))
        search = Search(
            topic_id=topic_id,
            queue_id=queue_id,
            start=start,
            stop=high,
            limit=wanted.limit,
            key=wanted.key,
            message_id=wanted.message_id,
            from_ms=wanted.from_ms,
            to_ms=wanted.to_ms,
        )
        parts.append(_of_queue(engine, search, wanted=wanted))
    found = pa.concat_tables(parts).sort_by(_ORDER).slice(0, wanted.limit)
    return found.combine_chunks()


def _of_queue(engine: Engine, search: Search, *, wanted: Wanted) -> pa.Table:
    if search.start >= search.stop or not search.limit:
        return schema.READ.empty_table()
    if search.key is None and search.message_id is None:
        # A search by time alone: DuckDB has the times of all messages, in order.
        return _read(engine, search, offsets=engine.database.find(search), wanted=wanted)
    segments = segments_of(engine).of_queue(search.topic_id, search.queue_id)
    parts, left, sealed_to = [schema.READ.empty_table()], search.limit, search.start
    for segment in segments:
        sealed_to = max(sealed_to, segment.end)
        if left <= 0:
            break
        if segment.end <= search.start:
            continue
        for rows in engine.segments.search(
            segment,
            key=search.key,
            message_id=search.message_id,
            wanted=wanted.matches,
            columns=wanted.columns(),
        ):
            parts.append(_as_read(rows.slice(0, left), search.queue_id))
            left -= parts[-1].num_rows
            if left <= 0:
                break
    if left > 0 and sealed_to < search.stop:
        rest = replace(search, start=sealed_to, limit=left)
        parts.append(_read(engine, rest, offsets=engine.database.find(rest), wanted=wanted))
    return pa.concat_tables(parts)


def _read(engine: Engine, search: Search, *, offsets: Int64s, wanted: Wanted) -> pa.Table:
    """Return the messages at these offsets, from the log or from segments."""
    n = len(offsets)
    if not n:
        return schema.READ.empty_table()
    queue_id = np.full(n, search.queue_id, dtype=np.int32)
    unknown = Places(np.full(n, -1, np.int64), np.zeros(n, np.int32))
    places = locate(
        engine, topic_id=search.topic_id, queue_id=queue_id, offset=offsets, places=unknown
    )
    rows = fetch(
        engine,
        places,
        columns=wanted.columns(),
        topic_id=search.topic_id,
        queue_id=queue_id,
        offset=offsets,
    )
    return _as_read(rows, search.queue_id)


def _as_read(rows: pa.Table, queue_id: int) -> pa.Table:
    """Return the rows as schema.READ; columns that were not read are null."""
    n = rows.num_rows
    columns = {
        "queue_id": pa.array(np.full(n, queue_id, dtype=np.int32)),
        "body": pa.nulls(n, pa.binary()),
        **dict(_columns(rows)),
    }
    return pa.table([columns[name] for name in schema.READ.names], schema=schema.READ)


def _columns(rows: pa.Table) -> Iterator[tuple[str, pa.ChunkedArray]]:
    for name in rows.column_names:
        yield name, rows[name].cast(schema.READ.field(name).type)


def _has_key(keys: pa.ListArray, key: str) -> pa.Array:
    """Return the mask of lists that contain the key."""
    rows = pc.list_parent_indices(keys).to_numpy()
    texts = pc.list_flatten(keys)
    found = np.zeros(len(keys), dtype=np.bool_)
    found[rows[pc.equal(texts, key).fill_null(False).to_numpy(zero_copy_only=False)]] = True
    return pa.array(found)
