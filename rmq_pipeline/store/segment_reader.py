"""The registered segments of a home, and the messages in them by (topic_id, queue_id, offset)."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, Generic, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rmq_pipeline import schema
from rmq_pipeline.archive.key_index import KeyIndexes
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.archive.segment_file import open_segment, place, read_failure
from rmq_pipeline.errors import CorruptLogError
from rmq_pipeline.message import Int64s
from rmq_pipeline.storage.root import Root
from rmq_pipeline.store.database import StoredSegments

#: Cache sizes for decoded row groups and for footers of open files.
_GROUPS_BYTES: Final = 48 << 20
_FOOTERS_BYTES: Final = 16 << 20
#: Memory of a parsed footer per byte of the serialized footer.
_FOOTER_FACTOR: Final = 8

_QueueKey: TypeAlias = tuple[int, int]
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Segments:
    """The segments registered in the log. Thread-safe.

    Args:
        root: location of the archive.
        kept_bytes: size of the cache of row groups; the least recently used is evicted first.
        claim: checks that the root is the home's; None: it was checked.
    """

    def __init__(
        self,
        root: Root,
        *,
        kept_bytes: int = _GROUPS_BYTES,
        claim: Callable[[], None] | None = None,
    ) -> None:
        self.root, self._claim = root, claim
        #: When a seal could last not reach the root's store, by the broker's clock, and why; None:
        #: it could.
        self.away: tuple[int, str] | None = None
        #: Held while segments are written: one seal at a time.
        self.sealing = threading.Lock()
        #: Held while registrations, file names and manifests change.
        self.changing = threading.RLock()
        #: Incremented on each change of the registered segments.
        self.version = 0
        #: How often another broker, which leads, has changed the registrations.
        self.outdated = 0
        #: False until ``load``, and again when the registrations are in doubt.
        self.loaded = False
        #: True if the folders contain exactly the registered files, and the last steps of seal are
        #: done.
        self.tidy = False
        #: The log before this position is in registered files.
        self.sealed_to = 0
        #: Log position up to which seal has searched for messages, and stored_at_ms of the next
        #: message.
        self.looked_at: tuple[int, int | None] = (0, None)
        self._lock = threading.Lock()
        self._queues: dict[_QueueKey, list[Segment]] = {}
        self._bases: dict[_QueueKey, Int64s] = {}
        #: Names by topic_id of the topics that have or had segments.
        self._topics: dict[int, str] = {}
        #: Segments that a compaction could not read; skipped until the next start.
        self.damaged: set[Segment] = set()
        #: Cache: stored_at_ms of a segment's last message.
        self.newest_ms: dict[Segment, int] = {}
        self._groups: _Kept[tuple[Segment, int], pa.RecordBatch] = _Kept(kept_bytes)
        self._files: _Kept[Segment, _File] = _Kept(_FOOTERS_BYTES)
        self._indexes = KeyIndexes(root)

    def claim(self) -> None:
        """Check that the archive belongs to the home; call it before changing its files.

        Raises:
            OSError: its store could not be reached at the start, and still cannot.
            ArchiveError: it belongs to another home.
        """
        if self._claim is not None:
            self._claim()
            self._claim = None

    def load(self, stored: StoredSegments, *, outdated: int) -> None:
        """Replace all registrations by those of the state tables.

        Args:
            outdated: how often they had been outdated before the tables were read.
        """
        segments = [
            Segment.from_path(path.partition("/")[2])
            for path in stored.segments.column("path").to_pylist()
        ]
        with self._lock:
            self._queues.clear()
            self._bases.clear()
            self._insert(segments)
            ends = stored.event_segments.column("to_position").to_numpy()
            self.sealed_to = int(ends.max()) if len(ends) else 0
            self.loaded = outdated == self.outdated
            self.version += 1

    def outdate(self) -> None:
        """Let the next reader load the registrations: the broker that leads has changed them."""
        with self._lock:
            self.outdated += 1
            self.loaded = False

    def add(self, segments: Iterable[Segment], *, sealed_to: int) -> None:
        """Add segments that were registered just now."""
        with self._lock:
            self._insert(segments)
            self.sealed_to = sealed_to
            self.version += 1

    def replace(self, removed: Sequence[Segment], added: Sequence[Segment]) -> None:
        """Replace segments by others; reads that began with the old ones may continue."""
        with self._lock:
            for segment in removed:
                self._queues[segment.topic_id, segment.queue_id].remove(segment)
            self._insert(added)
            for key in {(each.topic_id, each.queue_id) for each in removed}:
                left = self._queues[key]
                self._bases[key] = np.array([each.base for each in left], dtype=np.int64)
                if not left:
                    del self._queues[key], self._bases[key]
            self.version += 1
        # A deleted file occupies disk space while it is open.
        gone = set(removed)
        for segment in removed:
            self.newest_ms.pop(segment, None)
        self._indexes.forget(removed)
        self._files.drop(lambda segment: segment in gone)
        self._groups.drop(lambda key: key[0] in gone)

    def forget(self, topic_id: int) -> None:
        """Forget a deleted topic."""
        with self._lock:
            self._topics.pop(topic_id, None)
            for key in [key for key in self._queues if key[0] == topic_id]:
                del self._queues[key], self._bases[key]
            self.version += 1

    def topics_sealed(self) -> dict[int, str]:
        """Return names by topic_id of the topics that have or had segments."""
        with self._lock:
            return dict(self._topics)

    def of_topic(self, topic_id: int) -> list[Segment]:
        """Return the segments of a topic, in queue and offset order."""
        with self._lock:
            keys = sorted(key for key in self._queues if key[0] == topic_id)
            return [segment for key in keys for segment in self._queues[key]]

    def of_queue(self, topic_id: int, queue_id: int) -> list[Segment]:
        """Return the segments of a queue, in offset order."""
        with self._lock:
            return list(self._queues.get((topic_id, queue_id), ()))

    def search(
        self,
        segment: Segment,
        *,
        key: str | None,
        message_id: str | None,
        wanted: Callable[[pa.Table], pa.Array],
        columns: Sequence[str],
    ) -> Iterator[pa.Table]:
        """Yield messages of a segment in offset order, found with its index.

        Args:
            segment: a registered segment.
            key: one of the messages' keys; None for any.
            message_id: the message's id; None for any.
            wanted: returns a mask of the rows to yield, given a table of ``columns``.
            columns: columns of the segment to read.

        Raises:
            CorruptLogError: a file is damaged.
            StorageError: a file cannot be read now.
        """
        groups = self._indexes.row_groups(segment, key=key, message_id=message_id)
        if groups == []:
            return
        file = self._file(segment)
        for group in range(len(file.starts)) if groups is None else groups:
            table = file.columns(group, columns)
            found = table.filter(wanted(table))
            if found.num_rows:
                yield found

    def read(
        self, topic_id: int, queue_id: int, *, offsets: Int64s, columns: Sequence[str]
    ) -> pa.Table:
        """Return messages of a queue in the order of ``offsets``; ``columns`` of schema.MESSAGE.

        Raises:
            LookupError: an offset is in no registered segment.
            CorruptLogError: a file is damaged.
            StorageError: a file cannot be read now.
        """
        wanted = pa.schema([schema.MESSAGE.field(name) for name in columns])
        if not len(offsets):
            return wanted.empty_table()
        order = np.argsort(offsets, kind="stable")
        ascending = offsets[order]
        parts: list[pa.RecordBatch] = []
        done = 0
        while done < len(ascending):
            segment = self._segment_of(topic_id, queue_id, offset=int(ascending[done]))
            stop = int(np.searchsorted(ascending, segment.end))
            parts.extend(self._read_segment(segment, ascending[done:stop] - segment.base))
            done = stop
        constants = {"topic_id": topic_id, "queue_id": queue_id}
        found = _with_constants(pa.Table.from_batches(parts), wanted, constants=constants)
        if np.all(order[1:] > order[:-1]):
            return found
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        return found.combine_chunks().take(pa.array(back))

    def _insert(self, segments: Iterable[Segment]) -> None:
        changed = set()
        for segment in segments:
            key = segment.topic_id, segment.queue_id
            self._queues.setdefault(key, []).append(segment)
            self._topics[segment.topic_id] = segment.topic
            changed.add(key)
        for key in changed:
            self._queues[key].sort(key=lambda segment: segment.base)
            self._bases[key] = np.array([s.base for s in self._queues[key]], dtype=np.int64)

    def _segment_of(self, topic_id: int, queue_id: int, *, offset: int) -> Segment:
        key = topic_id, queue_id
        with self._lock:
            bases = self._bases.get(key)
            at = -1 if bases is None else int(np.searchsorted(bases, offset, side="right")) - 1
            segment = self._queues[key][at] if at >= 0 else None
        if segment is None or offset >= segment.end:
            raise LookupError(f"No segment has offset {offset} of queue {queue_id}, {topic_id}.")
        return segment

    def _read_segment(self, segment: Segment, rows: Int64s) -> list[pa.RecordBatch]:
        """Return ascending rows of a segment, one batch per row group."""
        file = self._file(segment)
        groups = np.searchsorted(file.starts, rows, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(rows)]
        parts = []
        for start, stop in pairwise(cuts):
            group = int(groups[start])
            batch = self._group(segment, file, group=group)
            parts.append(_rows(batch, rows[start:stop] - file.starts[group]))
        return parts

    def _file(self, segment: Segment) -> "_File":
        found = self._files.get(segment)
        if found is None:
            found = _File(self.root, segment)
            self._files.put(segment, found, cost_bytes=found.memory_bytes)
        return found

    def _group(self, segment: Segment, file: "_File", *, group: int) -> pa.RecordBatch:
        found = self._groups.get((segment, group))
        if found is None:
            found = file.read(group)
            self._groups.put((segment, group), found, cost_bytes=found.nbytes)
        return found


class _File:
    """An open segment; ``starts`` is the first row of each row group."""

    def __init__(self, root: Root, segment: Segment) -> None:
        self._root = root
        self._path = path = place(root, segment)
        self._lock = threading.Lock()
        try:
            self._file = open_segment(root.open(path))
        except (OSError, pa.ArrowException) as error:
            raise read_failure(error, root, path=path, read=lambda _: None) from error
        footer = self._file.metadata
        if footer.num_rows != segment.rows:
            raise CorruptLogError(f"{path} holds {footer.num_rows} messages, not {segment.rows}.")
        counts = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
        self.starts = np.cumsum([0, *counts[:-1]], dtype=np.int64)
        self.memory_bytes = footer.serialized_size * _FOOTER_FACTOR

    def read(self, group: int) -> pa.RecordBatch:
        (batch,) = self.columns(group, None).combine_chunks().to_batches()
        return batch

    def columns(self, group: int, names: Sequence[str] | None) -> pa.Table:
        def of(file: pq.ParquetFile) -> pa.Table:
            chosen = None if names is None else list(names)
            return file.read_row_group(group, columns=chosen, use_threads=False)

        try:
            with self._lock:
                return of(self._file)
        except (OSError, pa.ArrowException) as error:
            raise read_failure(error, self._root, path=self._path, read=of) from error


class _Kept(Generic[_Key, _Value]):
    """LRU cache with a budget of bytes."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()

    def get(self, key: _Key) -> _Value | None:
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def drop(self, is_gone: Callable[[_Key], bool]) -> None:
        with self._lock:
            for key in [key for key in self._kept if is_gone(key)]:
                self._used_bytes -= self._kept.pop(key)[1]

    def put(self, key: _Key, value: _Value, *, cost_bytes: int) -> None:
        with self._lock:
            self._used_bytes += cost_bytes - self._kept.pop(key, (value, 0))[1]
            self._kept[key] = (value, cost_bytes)
            while self._used_bytes > self._budget_bytes:
                self._used_bytes -= self._kept.popitem(last=False)[1][1]


def _rows(batch: pa.RecordBatch, rows: Int64s) -> pa.RecordBatch:
    first = int(rows[0])
    if int(rows[-1]) - first == len(rows) - 1 and np.all(np.diff(rows) == 1):
        return batch.slice(first, len(rows))
    return batch.take(pa.array(rows))


def _with_constants(
    table: pa.Table, wanted: pa.Schema, *, constants: Mapping[str, int]
) -> pa.Table:
    """Return these columns; values that are only in the segment's path are constants."""
    arrays = []
    for field in wanted:
        if field.name in table.column_names:
            arrays.append(table.column(field.name).cast(field.type))
        else:
            value = pa.scalar(constants.get(field.name), field.type)
            arrays.append(pa.chunked_array([pa.repeat(value, table.num_rows)]))
    return pa.Table.from_arrays(arrays, schema=wanted)
