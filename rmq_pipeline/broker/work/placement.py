"""Finding the places of messages: in the read-ahead or, once dispatched, in DuckDB."""

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.decide.queue_index import FindPlaces, FindUndispatched
from rmq_pipeline.broker.state.consumption import QueueKey
from rmq_pipeline.broker.state.queue_index import IndexRows, Places
from rmq_pipeline.broker.work.engine import Engine
from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.events import Kind

#: Offsets further apart than this are looked up one by one.
_GAP = 4096


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
