"""Reading messages from the commit log, or from segments if their log file was dropped."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.work import bodies
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.errors import OperatorError
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.segment_reader import Segments


def segments_of(engine: Engine) -> Segments:
    """Return the registered segments; load them after a start and after a failed seal."""
    segments = engine.segments
    if not segments.loaded:
        # Otherwise a registration during the load would be lost.
        with segments.changing:
            engine.dispatched(engine.state.changed(Kind.SEGMENT, 0))
            segments.load(engine.database.load_state())
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
        return bodies.fetch(log, places, columns=columns)
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
