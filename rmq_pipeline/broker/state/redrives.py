"""Dead letters with a redrive: one byte for each offset of a dead letter queue."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline.message import Int64s

Flags = npt.NDArray[np.bool_]
_NONE: Flags = np.zeros(0, dtype=np.bool_)


class Redriven:
    """Set of dead letters that a redrive has made available again.

    A redrive takes each once; a second failure of the message makes a new dead letter.
    """

    def __init__(self) -> None:
        self._flags: dict[tuple[int, int], Flags] = {}

    def has(self, topic_id: int, queue_id: int, *, offsets: Int64s) -> Flags:
        """Return the mask of these offsets that are in the set."""
        flags = self._flags.get((topic_id, queue_id), _NONE)
        known = offsets < len(flags)
        found = np.zeros(len(offsets), dtype=np.bool_)
        found[known] = flags[offsets[known]]
        return found

    def add(self, topic_id: int, queue_id: int, *, offsets: Int64s) -> None:
        """Add these dead letters."""
        if not len(offsets):
            return
        key = (topic_id, queue_id)
        flags = self._flags.get(key, _NONE)
        stop = int(offsets.max()) + 1
        if stop > len(flags):
            grown = np.zeros(max(stop, 2 * len(flags)), dtype=np.bool_)
            grown[: len(flags)] = flags
            flags = self._flags[key] = grown
        flags[offsets] = True

    def load(self, table: pa.Table) -> None:
        """Add the rows of the state tables: topic_id, queue_id, queue_offset."""
        topics, queues, offsets = (
            table.column(name).to_numpy() for name in ("topic_id", "queue_id", "queue_offset")
        )
        for topic_id in np.unique(topics):
            for queue_id in np.unique(queues[topics == topic_id]):
                mine = (topics == topic_id) & (queues == queue_id)
                self.add(int(topic_id), int(queue_id), offsets=offsets[mine])
