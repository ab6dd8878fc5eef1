"""Messages wherever they lie: in the commit log, or in segments once their log file was dropped."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.stored import bodies
from rmq_pipeline.broker.stored.bodies import Places
from rmq_pipeline.errors import OperatorError
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.segment_reader import Segments


def segments_of(engine: Engine) -> Segments:
    """The registered segments, looked up once after start and after a failed seal."""
    segments = engine.segments
    if not segments.loaded:
        # What is registered meanwhile must not be forgotten again.
        with segments.changing:
            engine.dispatched()
            segments.load(engine.database.load_state())
    return segments


@contextmanager
def registering(segments: Segments) -> Iterator[None]:
    """Something is registered: when that fails, what is registered is looked up again.

    A refusal has changed nothing; of a write that failed nobody knows.
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
    """The messages at these places, in their order; ``columns`` of schema.MESSAGE.

    Args:
        places: in the log, as they were when it was written.
        queue_id: of each message; it and ``offset`` find what the log has dropped.

    Raises:
        LookupError: a place is neither in the log nor in a segment.
    """
    log = engine.log
    try:
        return bodies.fetch(log, places, columns=columns)
    except LookupError:
        gone = places.position < log.first
        if not gone.any():
            raise
    there, rows = np.flatnonzero(~gone), np.flatnonzero(gone)
    parts, order = [], [there]
    if len(there):
        # Not straight from the log: another file of it may be dropped just now.
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
