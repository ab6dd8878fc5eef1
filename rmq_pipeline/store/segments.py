"""Parquet segments: messages of a queue that are on their way out of the commit log.

``<topics>/<topic>/<topic_id>/queue_id=<n>/<base>-<end>.parquet`` holds the offsets [base, end) of a
queue, dense and in order. ``queue_id=`` makes DuckDB, Spark, pyarrow and pandas read the folder of
a topic as one table, so that column is not in the files: the last two refuse one that is in both.
Row groups are small: whoever looks up one offset decodes about a megabyte.

A segment is written to a hidden name, synced, renamed, and counts once the log says so.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rmq_pipeline import schema
from rmq_pipeline.errors import StorageError
from rmq_pipeline.store.log_file import sync_folder
from rmq_pipeline.topic import HALF_TOPIC_ID, SCHEDULE_TOPIC_ID

#: A segment on its way to its name; readers pass over hidden files, and it is no ``.parquet``.
UNFINISHED: Final = ".new"
SUFFIX: Final = ".parquet"

_GROUP_BYTES: Final = 1 << 20
_GROUP_ROWS: Final = 8192
#: What a row takes beside its body, about.
_ROW_BYTES: Final = 128
#: A queue's rows are kept back until they make a few row groups; of all queues this much.
_QUEUE_PENDING_BYTES: Final = 4 << 20
_PENDING_BYTES: Final = 48 << 20
_COMPRESSION_LEVEL: Final = 1
_DICTIONARIES: Final = [
    "tag",
    "message_group",
    "properties.key_value.key",
    "properties.key_value.value",
]
_STATISTICS: Final = [
    "queue_offset",
    "tag",
    "message_group",
    "born_at_ms",
    "stored_at_ms",
    "deliver_at_ms",
]
_LEFT_OUT: Final = frozenset({"topic_id", "queue_id"})
#: Their messages are for another topic.
_AIMED: Final = frozenset({SCHEDULE_TOPIC_ID, HALF_TOPIC_ID})

#: The name of a topic, None when it is gone.
NameOf: TypeAlias = Callable[[int], str | None]


def columns_of(topic_id: int) -> pa.Schema:
    """What the segments of a topic hold: schema.MESSAGE but topic_id and queue_id.

    Only those of the topics in which messages wait for another one have target_topic_id.
    """
    without = _LEFT_OUT if topic_id in _AIMED else {*_LEFT_OUT, "target_topic_id"}
    return pa.schema([field for field in schema.MESSAGE if field.name not in without])


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """The offsets [base, end) of a queue, in one file."""

    topic: str
    topic_id: int
    queue_id: int
    base: int
    end: int

    @property
    def rows(self) -> int:
        """How many messages it holds."""
        return self.end - self.base

    @property
    def name(self) -> str:
        """Its path inside the folder of the topic."""
        return f"queue_id={self.queue_id}/{self.base:020d}-{self.end:020d}{SUFFIX}"

    @property
    def relative(self) -> str:
        """Its path inside the folder of all topics."""
        return f"{self.topic}/{self.topic_id}/{self.name}"

    @classmethod
    def from_path(cls, relative: str) -> "Segment":
        """What ``relative`` gave.

        Raises:
            ValueError: it is no such path.
        """
        topic, topic_id, queue, name = relative.split("/")
        base, end = name.removesuffix(SUFFIX).split("-")
        return cls(topic, int(topic_id), int(queue.removeprefix("queue_id=")), int(base), int(end))


def topic_folder(topics: Path, *, topic: str, topic_id: int) -> Path:
    """Where the segments of a topic are, and their manifest."""
    return topics / topic / str(topic_id)


class SegmentWriter:
    """Writes a stretch of the log as segments: one for each queue with messages in it.

    Args:
        topics: the folder of all topics.
        name_of: messages of topics without a name are passed over.
    """

    def __init__(self, topics: Path, name_of: NameOf) -> None:
        self._topics = topics
        self._name_of = name_of
        self._queues: dict[tuple[int, int], _Queue] = {}

    def add(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Take in batches of schema.MESSAGE in log order.

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
                queue = self._queue(name, topic_id, queue_id=int(queue_ids[start]))
                queue.append(table.slice(start, stop - start))
        self._limit_pending()

    def finish(self) -> None:
        """Complete the files, on disk under their hidden names.

        Raises:
            OSError: writing failed.
        """
        for queue in self._queues.values():
            queue.close()

    def publish(self) -> list[Segment]:
        """Give the finished files their names, on disk; what they are."""
        segments = [queue.publish() for queue in self._queues.values()]
        folders = {self._topics}
        for segment in segments:
            folder = (self._topics / segment.relative).parent
            folders.update((folder, folder.parent, folder.parent.parent))
        for folder in folders:
            sync_folder(folder)
        return segments

    def abort(self) -> None:
        """Delete what is not finished."""
        for queue in self._queues.values():
            queue.abort()

    def _queue(self, name: str, topic_id: int, *, queue_id: int) -> "_Queue":
        found = self._queues.get((topic_id, queue_id))
        if found is None:
            found = self._queues[topic_id, queue_id] = _Queue(
                self._topics, name, topic_id=topic_id, queue_id=queue_id
            )
        return found

    def _limit_pending(self) -> None:
        """Many queues with a little each: the largest parts go first."""
        pending = sum(queue.pending_bytes for queue in self._queues.values())
        if pending <= _PENDING_BYTES:
            return
        for queue in sorted(self._queues.values(), key=lambda queue: -queue.pending_bytes):
            pending -= queue.pending_bytes
            queue.flush()
            if pending <= _PENDING_BYTES // 2:
                return


class _Queue:
    """The segment of one queue while it is written."""

    def __init__(self, topics: Path, topic: str, *, topic_id: int, queue_id: int) -> None:
        self._topics = topics
        self._topic = topic
        self._topic_id = topic_id
        self._queue_id = queue_id
        self._columns = columns_of(topic_id)
        self._base = self._end = -1
        self._pending: list[pa.Table] = []
        self.pending_bytes = 0
        self._file: pq.ParquetWriter | None = None

    def append(self, table: pa.Table) -> None:
        """Take rows in offset order; columns that a segment does not have are left out."""
        table = table.select(self._columns.names)
        offsets = table.column("queue_offset")
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        if self._base < 0:
            self._base = self._end = first
        if first != self._end or last - first != table.num_rows - 1:
            raise StorageError(
                f"Queue {self._queue_id} of topic {self._topic} lacks offsets after {self._end}."
            )
        self._end = last + 1
        self._pending.append(table)
        self.pending_bytes += table.nbytes
        if self.pending_bytes >= _QUEUE_PENDING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is pending, in row groups of about the same bytes."""
        if not self._pending:
            return
        table = pa.concat_tables(self._pending)
        self._pending, self.pending_bytes = [], 0
        if self._file is None:
            self._file = self._begin()
        for start, stop in pairwise(_cuts(table)):
            self._file.write_table(table.slice(start, stop - start), row_group_size=_GROUP_ROWS)

    def close(self) -> None:
        self.flush()
        assert self._file is not None
        self._file.close()
        descriptor = os.open(self._unfinished, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def publish(self) -> Segment:
        segment = Segment(self._topic, self._topic_id, self._queue_id, self._base, self._end)
        self._unfinished.rename(self._topics / segment.relative)
        return segment

    def abort(self) -> None:
        if self._file is not None and self._file.is_open:
            # The file goes: whether its footer could still be written does not matter.
            with suppress(OSError):
                self._file.close()
        self._unfinished.unlink(missing_ok=True)

    @property
    def _unfinished(self) -> Path:
        folder = topic_folder(self._topics, topic=self._topic, topic_id=self._topic_id)
        return folder / f"queue_id={self._queue_id}" / f".{self._base:020d}{UNFINISHED}"

    def _begin(self) -> pq.ParquetWriter:
        self._unfinished.parent.mkdir(parents=True, exist_ok=True)
        return pq.ParquetWriter(
            self._unfinished,
            self._columns,
            compression="zstd",
            compression_level=_COMPRESSION_LEVEL,
            use_dictionary=_DICTIONARIES,
            write_statistics=_STATISTICS,
            sorting_columns=[pq.SortingColumn(0)],
        )


def _cuts(table: pa.Table) -> list[int]:
    """Where row groups begin and end."""
    lengths = pc.binary_length(table.column("body")).to_numpy()
    ends = np.cumsum(lengths, dtype=np.int64) + np.arange(1, len(lengths) + 1) * _ROW_BYTES
    groups = max(1, round(int(ends[-1]) / _GROUP_BYTES))
    shares = ends[-1] * np.arange(1, groups) // groups
    inner = np.unique(np.searchsorted(ends, shares, side="right"))
    return [0, *inner[(inner > 0) & (inner < len(ends))].tolist(), len(ends)]
