"""Splitting many messages into parts of bounded size before they are read."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow.compute as pc

from rmq_pipeline import limits
from rmq_pipeline.broker.state.queue_index import Places
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.broker.work.reading import segments_of
from rmq_pipeline.message import Int32s, Int64s

#: A message this near to the next section is not read to be sized: its section is no larger.
_NEAR_BYTES: Final = 64 * 1024
_FAR_BYTES: Final = 1 << 40
#: Sections sized together, and messages sized at a time if they are in more sections. The log
#: caches this many small sections decoded.
_SIZED_SECTIONS: Final = 4_096
#: Estimated bytes of a message besides its body, unless it has long properties.
_BESIDE_BYTES: Final = 256


def parts(
    engine: Engine,
    places: Places,
    *,
    topic_id: int,
    queue_id: Int32s,
    offset: Int64s,
    bound_bytes: int = limits.STEP_BYTES,
) -> Iterator[slice]:
    """Yield slices of these messages, each of ``bound_bytes`` at most, or of one message.

    Messages of one section are sized together, because sizing reads the whole section. If the
    messages are in many sections, some messages are sized at a time. Their sections are still
    cached when the messages are copied.

    Args:
        places: in the log, as they were written.
        queue_id: of each message; with ``offset`` it finds messages dropped from the log.
    """
    if len(places) * limits.BODY_BYTES <= bound_bytes:
        yield slice(0, len(places))
        return
    far = np.count_nonzero(np.diff(np.unique(places.position)) > _NEAR_BYTES)
    at_once = len(places) if far < _SIZED_SECTIONS else _SIZED_SECTIONS
    for first in range(0, len(places), at_once):
        rows = slice(first, first + at_once)
        some = sizes(
            engine,
            Places(places.position[rows], places.row[rows]),
            topic_id=topic_id,
            queue_id=queue_id[rows],
            offset=offset[rows],
        )
        for part in cut(some, bound_bytes):
            yield slice(first + part.start, first + part.stop)


def sizes(
    engine: Engine,
    places: Places,
    *,
    topic_id: int,
    queue_id: Int32s,
    offset: Int64s,
    near_bytes: int = _NEAR_BYTES,
) -> Int64s:
    """Return an upper estimate of the bytes of each message; see ``parts``.

    Args:
        near_bytes: a message this near to the next one counts with all bytes between them. With 0,
            every section is read, and the estimate is close.
    """
    found, gone = _sizes_in_log(engine, places, near_bytes=near_bytes)
    for queue in np.unique(queue_id[gone]).tolist():
        rows = gone[queue_id[gone] == queue]
        found[rows] = _sizes_in_segments(
            engine, topic_id=topic_id, queue_id=queue, offset=offset[rows]
        )
    return found


def cut(lengths: Int64s, bound_bytes: int) -> list[slice]:
    """Return consecutive slices of ``bound_bytes`` at most, or of one row."""
    ends = np.cumsum(lengths)
    found, start = [], 0
    while start < len(lengths):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + bound_bytes, side="right"))
        found.append(slice(start, max(stop, start + 1)))
        start = found[-1].stop
    return found


def _sizes_in_log(engine: Engine, places: Places, *, near_bytes: int) -> tuple[Int64s, Int64s]:
    """Return an upper estimate of each message's bytes, and the rows that the log has dropped."""
    order = np.argsort(places.position, kind="stable")
    positions, starts, counts = np.unique(
        places.position[order], return_index=True, return_counts=True
    )
    room = np.append(np.diff(positions), _FAR_BYTES)
    found = np.empty(len(places), dtype=np.int64)
    found[order] = np.repeat(-(-room // counts), counts)
    gone = [np.flatnonzero(places.position < engine.log.first)]
    for i in np.flatnonzero((room > near_bytes) & (positions >= engine.log.first)).tolist():
        rows = order[starts[i] : starts[i] + counts[i]]
        try:
            batch = engine.log.read(int(positions[i])).batch
        except LookupError:  # dropped just now
            gone.append(rows)
            continue
        lengths = pc.binary_length(batch.column("body")).to_numpy()
        beside = max(batch.nbytes - int(lengths.sum()), 0) // len(lengths) + 1
        found[rows] = lengths[places.row[rows]] + beside
    return found, np.concatenate(gone)


def _sizes_in_segments(engine: Engine, *, topic_id: int, queue_id: int, offset: Int64s) -> Int64s:
    """Return the bytes of a queue's messages that are in segments only, decoding some at a time."""
    order = np.argsort(offset, kind="stable")
    found = np.zeros(len(offset), dtype=np.int64)
    at_once = limits.STEP_BYTES // limits.BODY_BYTES
    for start in range(0, len(order), at_once):
        rows = order[start : start + at_once]
        read = segments_of(engine).read(topic_id, queue_id, offsets=offset[rows], columns=("body",))
        found[rows] = pc.binary_length(read.column("body")).to_numpy() + _BESIDE_BYTES
    return found
