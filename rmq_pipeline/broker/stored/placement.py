"""Finding where messages lie whose read-ahead is not held."""

import numpy as np
import numpy.typing as npt

from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.broker.receiving.scan import QueueKey
from rmq_pipeline.broker.stored.bodies import Places
from rmq_pipeline.message import Int32s, Int64s

#: Offsets further apart than this are looked up one by one.
_GAP = 4096


def locate(
    engine: Engine, *, topic_id: int, queue_id: Int32s, offset: Int64s, places: Places
) -> Places:
    """Places with those filled in that the read-ahead did not hold.

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
    """The tag hash of messages anywhere in a queue."""
    tags = np.zeros(len(offset), dtype=np.int64)
    for part in _near_each_other(offset, np.arange(len(offset))):
        first, last = int(offset[part[0]]), int(offset[part[-1]])
        page = engine.database.index(key.topic_id, key.queue_id, start=first, stop=last + 1)
        tags[part] = page.tag_hash[offset[part] - page.base]
    return tags


def _near_each_other(offset: Int64s, rows: npt.NDArray[np.intp]) -> list[npt.NDArray[np.intp]]:
    """These rows by offset, cut wherever the next one lies far away."""
    if not len(rows):
        return []
    rows = rows[np.argsort(offset[rows], kind="stable")]
    return np.split(rows, np.flatnonzero(np.diff(offset[rows]) > _GAP) + 1)
