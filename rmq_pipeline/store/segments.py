"""Parquet segments under construction: messages of many queues that leave the commit log."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from rmq_pipeline.archive.root import Root
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.archive.segment_file import SegmentFile, sync_names

#: Messages of all queues buffered up to this size, so that they fill row groups.
_PENDING_BYTES: Final = 48 << 20
#: Files that are completed concurrently.
_CLOSED_AT_ONCE: Final = 4

#: Returns the name of a topic, or None if the topic was deleted.
NameOf: TypeAlias = Callable[[int], str | None]


class SegmentWriter:
    """Writes a range of the log as one segment per queue.

    Args:
        root: location of the archive.
        name_of: messages of topics without a name are skipped.
    """

    def __init__(self, root: Root, name_of: NameOf) -> None:
        self._root = root
        self._name_of = name_of
        self._queues: dict[tuple[int, int], SegmentFile] = {}
        #: Size in memory of the messages added so far.
        self.raw_bytes = 0

    def add(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Add batches of schema.MESSAGE in log order.

        Raises:
            StorageError: offsets are missing.
            OSError: writing failed.
        """
        table = pa.Table.from_batches(batches).combine_chunks()
        topic_ids = table.column("topic_id").to_numpy()
        queue_ids = table.column("queue_id").to_numpy()
        order = np.lexsort((queue_ids, topic_ids))
        if np.any(order[1:] < order[:-1]):
            table = table.take(pa.array(order))
            topic_ids, queue_ids = topic_ids[order], queue_ids[order]
        changes = (np.diff(topic_ids) != 0) | (np.diff(queue_ids) != 0)
        bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(order)]
        for start, stop in pairwise(bounds):
            topic_id = int(topic_ids[start])
            name = self._name_of(topic_id)
            if name is not None:
                rows = table.slice(start, stop - start)
                self._queue(name, topic_id, queue_id=int(queue_ids[start])).append(rows)
                self.raw_bytes += rows.nbytes
        self._limit_pending()

    def finish(self) -> None:
        """Complete and sync the files under their temporary hidden names.

        Raises:
            OSError: writing failed.
        """
        # Most of the time is spent waiting for the disk, which commits several waiting files at
        # once.
        with ThreadPoolExecutor(_CLOSED_AT_ONCE) as pool:
            for _ in pool.map(SegmentFile.close, self._queues.values()):
                pass

    def publish(self) -> list[Segment]:
        """Rename the finished files, sync the names, and return the segments."""
        segments = [queue.publish() for queue in self._queues.values()]
        sync_names(self._root, segments)
        return segments

    def abort(self) -> None:
        """Delete all unfinished files."""
        for queue in self._queues.values():
            queue.abort()

    def _queue(self, name: str, topic_id: int, *, queue_id: int) -> SegmentFile:
        found = self._queues.get((topic_id, queue_id))
        if found is None:
            found = self._queues[topic_id, queue_id] = SegmentFile(
                self._root, name, topic_id=topic_id, queue_id=queue_id
            )
        return found

    def _limit_pending(self) -> None:
        """Flush the largest buffers when many queues hold a little each."""
        pending = sum(queue.pending_bytes for queue in self._queues.values())
        if pending <= _PENDING_BYTES:
            return
        for queue in sorted(self._queues.values(), key=lambda queue: -queue.pending_bytes):
            pending -= queue.pending_bytes
            queue.flush()
            if pending <= _PENDING_BYTES // 2:
                return
