"""How much of many messages is copied at once: their sizes, known before they are read."""

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow.compute as pc

from rmq_pipeline import limits
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.stored.bodies import Places
from rmq_pipeline.broker.stored.sealed import segments_of
from rmq_pipeline.message import Int32s, Int64s

#: What lies this near to the next message is not looked at: its section is no larger than that.
_NEAR_BYTES: Final = 64 * 1024
_FAR_BYTES: Final = 1 << 40
#: Sections that are looked at together, and messages where there are more: the log keeps that many
#: small ones decoded.
_SIZED_SECTIONS: Final = 4_096
#: What a message takes beside its body, unless it has long properties.
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
    """Slices of these messages, each of ``bound_bytes`` at most, or of one message.

    All of a section are sized together, since it is read for it. Where each message is in another
    one, some are sized at a time: what is read for it is still at hand when they are copied.

    Args:
        places: in the log, as they were when it was written.
        queue_id: of each message; it and ``offset`` find what the log has dropped.
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
    """Bytes of each message, more rather than less; see ``parts``.

    Args:
        near_bytes: a message this near to the next one counts with what lies between them; with 0
            every section is looked at, and no message counts for much more than it has.
    """
    found, gone = _sizes_in_log(engine, places, near_bytes=near_bytes)
    for queue in np.unique(queue_id[gone]).tolist():
        rows = gone[queue_id[gone] == queue]
        found[rows] = _sizes_in_segments(
            engine, topic_id=topic_id, queue_id=queue, offset=offset[rows]
        )
    return found


def cut(lengths: Int64s, bound_bytes: int) -> list[slice]:
    """Consecutive slices that add up to ``bound_bytes`` at most, or hold one row."""
    ends = np.cumsum(lengths)
    found, start = [], 0
    while start < len(lengths):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + bound_bytes, side="right"))
        found.append(slice(start, max(stop, start + 1)))
        start = found[-1].stop
    return found


def _sizes_in_log(engine: Engine, places: Places, *, near_bytes: int) -> tuple[Int64s, Int64s]:
    """Bytes of each message, more rather than less; the rows of those that the log has dropped."""
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
    """Bytes of messages of a queue that are in segments only; some are decoded at a time."""
    order = np.argsort(offset, kind="stable")
    found = np.zeros(len(offset), dtype=np.int64)
    at_once = limits.STEP_BYTES // limits.BODY_BYTES
    for start in range(0, len(order), at_once):
        rows = order[start : start + at_once]
        read = segments_of(engine).read(topic_id, queue_id, offsets=offset[rows], columns=("body",))
        found[rows] = pc.binary_length(read.column("body")).to_numpy() + _BESIDE_BYTES
    return found
