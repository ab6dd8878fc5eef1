"""Segment files: writing them from the log, merging them, telling damage from a failing device.

A segment has row groups of about a megabyte, an index of its keys, and two names.
Row groups are small because a lookup of one offset decodes a whole row group. A file is written
under a hidden name, synced and renamed. It gets its first name once it is registered.
"""

import io
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from typing_extensions import override

from rmq_pipeline import checked_parquet, schema
from rmq_pipeline.archive import key_index
from rmq_pipeline.archive.segment import (
    HIDDEN,
    INDEX,
    UNFINISHED,
    Segment,
    columns_of,
    topic_folder,
    unfinished_name,
)
from rmq_pipeline.errors import CorruptLogError, StorageError
from rmq_pipeline.storage.local import LocalRoot
from rmq_pipeline.storage.place import opened
from rmq_pipeline.storage.root import Root

_GROUP_BYTES: Final = 1 << 20
#: Estimated bytes of a row besides its body.
_ROW_BYTES: Final = 136
#: Rows of a queue are buffered until they fill a few row groups.
_PENDING_BYTES: Final = 4 << 20
_COMPRESSION_LEVEL: Final = 1
_DICTIONARIES: Final = [
    "tag",
    "message_group",
    "properties.key_value.key",
    "properties.key_value.value",
]
_STATISTICS: Final = [
    "queue_offset",
    "message_id",
    "tag",
    "message_group",
    "born_at_ms",
    "stored_at_ms",
    "deliver_at_ms",
]
#: Messages of all queues buffered up to this size, so that they fill row groups.
_ALL_PENDING_BYTES: Final = 48 << 20
#: Files that are completed concurrently.
_CLOSED_AT_ONCE: Final = 4

#: Returns the name of a topic, or None if the topic was deleted.
NameOf: TypeAlias = Callable[[int], str | None]


class SegmentFile:
    """Writer of one segment."""

    def __init__(
        self, root: Root, topic: str, *, topic_id: int, queue_id: int, epoch: int = 0
    ) -> None:
        self._root = root
        self._epoch = epoch
        self._topic = topic
        self._topic_id = topic_id
        self._queue_id = queue_id
        self._columns = columns_of(topic_id)
        self._base = self._end = -1
        self._pending: list[pa.Table] = []
        #: Bytes that are not written yet.
        self.pending_bytes = 0
        self._sink: pa.NativeFile | None = None
        self._file: pq.ParquetWriter | None = None
        self._row_groups = 0
        # Distinguishes two writers of the same segment, such as a retried task.
        self._attempt = secrets.token_hex(4)
        self._index = key_index.Collector()

    def append(self, table: pa.Table) -> None:
        """Append rows in offset order; columns that segments do not have are dropped.

        Raises:
            StorageError: offsets are missing.
            OSError: writing failed.
        """
        table = table.select(self._columns.names)
        offsets = table.column("queue_offset")
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        if self._base < 0:
            self._base = self._end = first
        if first != self._end or last - first != table.num_rows - 1:
            raise StorageError(
                f"Queue {self._queue_id} of topic {self._topic} lacks messages: offset {self._end}"
                f" comes next, and the {table.num_rows} rows have offsets {first} to {last}."
            )
        self._end = last + 1
        self._pending.append(table)
        self.pending_bytes += table.nbytes
        if self.pending_bytes >= _PENDING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows, in row groups of about equal size."""
        if not self._pending:
            return
        table = pa.concat_tables(self._pending)
        self._pending, self.pending_bytes = [], 0
        if self._file is None:
            self._file = self._begin()
        cuts = _cuts(table)
        self._index.add(table, cuts=cuts, row_group=self._row_groups)
        for start, stop in pairwise(cuts):
            self._file.write_table(table.slice(start, stop - start), row_group_size=stop - start)
        self._row_groups += len(cuts) - 1

    def close(self) -> None:
        """Complete the file and its index, and sync both under their hidden names."""
        self.flush()
        assert self._file is not None
        assert self._sink is not None
        self._file.close()
        self._sink.close()
        self._root.sync(self._unfinished)
        key_index.write(self._root, self._unfinished_index, index=self._index.table())

    def publish(self) -> Segment:
        """Rename the finished files to the segment's names; ``show`` adds the first name."""
        segment = Segment(
            self._topic, self._topic_id, self._queue_id, self._base, self._end, self._epoch
        )
        self._root.rename(self._unfinished_index, segment.index)
        self._root.rename(self._unfinished, place(self._root, segment))
        return segment

    def abort(self) -> None:
        """Delete the unfinished files."""
        # The file is deleted, so a failure to write its footer does not matter.
        with suppress(OSError):
            if self._file is not None and self._file.is_open:
                self._file.close()
        with suppress(OSError):
            if self._sink is not None:
                self._sink.close()
        self._root.delete(self._unfinished)
        self._root.delete(self._unfinished_index)

    @property
    def _unfinished(self) -> str:
        folder = f"{topic_folder(self._topic, self._topic_id)}/{HIDDEN}/queue_id={self._queue_id}"
        name = unfinished_name(self._base, epoch=self._epoch, attempt=self._attempt)
        return f"{folder}/{name}"

    @property
    def _unfinished_index(self) -> str:
        return self._unfinished.removesuffix(UNFINISHED) + INDEX + UNFINISHED

    def _begin(self) -> pq.ParquetWriter:
        self._sink = self._root.create(self._unfinished)
        return checked_parquet.writer(
            self._sink,
            self._columns,
            compression="zstd",
            compression_level=_COMPRESSION_LEVEL,
            use_dictionary=_DICTIONARIES,
            write_statistics=_STATISTICS,
            sorting_columns=[pq.SortingColumn(0)],
        )


def open_segment(source: pa.NativeFile) -> pq.ParquetFile:
    """Open the file of a segment for reading.

    Pages have checksums, but the footer has none, so its columns and row counts are checked here.

    Raises:
        OSError, pa.ArrowException: the file cannot be read, or is damaged.
    """
    file = checked_parquet.open_file(source)
    for field in file.schema_arrow:
        if field.name not in schema.MESSAGE.names:
            raise pa.ArrowInvalid(f"column {field.name!r} does not belong to a segment")
        if field.type != schema.MESSAGE.field(field.name).type:
            raise pa.ArrowInvalid(f"column {field.name} of a segment cannot be {field.type}")
    footer = file.metadata
    rows = sum(footer.row_group(i).num_rows for i in range(footer.num_row_groups))
    if rows != footer.num_rows:
        raise pa.ArrowInvalid(
            f"the row groups have {rows} rows, but the footer says {footer.num_rows}"
        )
    return file


def place(root: Root, segment: Segment) -> str:
    """Return the path for reading a segment: the name that outlives a replacement for the grace."""
    return segment.kept if root.has_links else segment.relative


def sync_names(root: Root, segments: Iterable[Segment]) -> None:
    """Sync the names under which segments are read."""
    paths = {path for each in segments for path in (place(root, each), each.index)}
    _sync_folders(root, paths)


def sync_shown(root: Root, segments: Iterable[Segment]) -> None:
    """Sync the names that globs see.

    Needed only after names were deleted, which a crash could restore; ``tidy`` restores missing
    ones.
    """
    _sync_folders(root, {each.relative for each in segments})


def _sync_folders(root: Root, paths: Iterable[str]) -> None:
    # A folder that was never created, or was deleted when it became empty, has no names.
    root.sync_folders({path.rpartition("/")[0] for path in paths}, missing_ok=True)


def show(root: Root, segments: Iterable[Segment]) -> None:
    """Add the names that globs see: the segments are current from now on."""
    if isinstance(root, LocalRoot) and root.has_links:
        for segment in segments:
            root.link(segment.kept, segment.relative)


def hide(root: Root, segments: Iterable[Segment]) -> None:
    """Delete the names that globs see; the second names stay."""
    if root.has_links:
        for segment in segments:
            root.delete(segment.relative)


def _cuts(table: pa.Table) -> list[int]:
    """Return the rows at which row groups begin, and the number of rows."""
    lengths = pc.binary_length(table.column("body")).to_numpy()
    ends = np.cumsum(lengths, dtype=np.int64) + np.arange(1, len(lengths) + 1) * _ROW_BYTES
    groups = max(1, -(-int(ends[-1]) // _GROUP_BYTES))
    shares = ends[-1] * np.arange(1, groups) // groups
    inner = np.unique(np.searchsorted(ends, shares, side="right"))
    return [0, *inner[(inner > 0) & (inner < len(ends))].tolist(), len(ends)]


def read_failure(
    error: Exception, root: Root, *, path: str, read: Callable[[pq.ParquetFile], object]
) -> CorruptLogError | StorageError:
    """Return the error to raise: CorruptLogError if all bytes are readable but invalid.

    Arrow raises OSError for a damaged page as well as for a missing file, so the file is read
    again.

    Args:
        error: the error of the first attempt.
        read: repeats the read of the first attempt.
    """
    try:
        with root.open(path) as file:
            watched = _Watched(file)
            try:
                read(open_segment(pa.PythonFile(watched, mode="r")))
            except (OSError, pa.ArrowException):
                if not watched.failed:
                    return CorruptLogError(f"{path} is damaged: {error}.")
    except OSError:
        pass  # the first error is as good
    return StorageError(f"{path} cannot be read: {error}.")


class _Watched(io.RawIOBase):
    """File object that notes whether a read failed."""

    def __init__(self, file: pa.NativeFile) -> None:
        super().__init__()
        self._file = file
        self.failed = False

    @override
    def seekable(self) -> bool:
        return True

    @override
    def readable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        at: int = self._file.tell()
        return at

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        at: int = self._noted(lambda: self._file.seek(offset, whence))
        return at

    @override
    def read(self, size: int = -1, /) -> bytes:
        data: bytes = self._noted(lambda: self._file.read(size if size >= 0 else None))
        return data

    def _noted(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except OSError:
            self.failed = True
            raise


@dataclass(frozen=True, slots=True)
class Merger:
    """Adjacent segments of one queue, in offset order, to be merged into one."""

    #: Address of the archive's root.
    root: str
    inputs: tuple[Segment, ...]
    #: Total size of the inputs.
    bytes: int
    #: Epoch in the name of the merged segment.
    epoch: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the merger as JSON, for a process that reaches the broker by Flight."""
        paths = [each.relative for each in self.inputs]
        return {"root": self.root, "inputs": paths, "bytes": self.bytes, "epoch": self.epoch}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Return the merger from the result of ``to_json``."""
        inputs = tuple(Segment.from_path(path) for path in found["inputs"])
        return cls(found["root"], inputs, found["bytes"], found.get("epoch", 0))

    def run(self) -> Segment:
        """Write the merged segment and return it; ``show`` later adds the name that globs see.

        Raises:
            CorruptLogError: an input is damaged; no merged file is left.
            StorageError: an input cannot be read, or offsets between inputs are missing.
            OSError: writing failed.
        """
        return merge(opened(self.root), self.inputs, epoch=self.epoch)


def merge(root: Root, inputs: Sequence[Segment], *, epoch: int = 0) -> Segment:
    """Write adjacent segments of a queue, in offset order, as one; see ``Merger.run``."""
    first = inputs[0]
    file = SegmentFile(
        root, first.topic, topic_id=first.topic_id, queue_id=first.queue_id, epoch=epoch
    )
    try:
        for segment in inputs:
            _append(file, root, segment=segment)
        file.close()
        merged = file.publish()
    except BaseException:
        file.abort()
        raise
    sync_names(root, [merged])
    return merged


def write_part(root: Root, segment: Segment, *, source: Segment) -> None:
    """Write a segment again whose messages a merge has put into a larger one.

    Raises:
        CorruptLogError: the larger one is damaged.
        StorageError: it cannot be read at present.
    """
    file = SegmentFile(
        root,
        segment.topic,
        topic_id=segment.topic_id,
        queue_id=segment.queue_id,
        epoch=segment.epoch,
    )
    try:
        for table in _row_groups(root, source):
            offsets = table.column("queue_offset")
            wanted = pc.and_(pc.greater_equal(offsets, segment.base), pc.less(offsets, segment.end))
            if (part := table.filter(wanted)).num_rows:
                file.append(part)
        file.close()
        if file.publish() != segment:
            raise CorruptLogError(f"{source.relative} lacks messages of {segment.relative}.")
    except BaseException:
        file.abort()
        raise
    sync_names(root, [segment])


def _append(file: SegmentFile, root: Root, *, segment: Segment) -> None:
    for table in _row_groups(root, segment):
        file.append(table)


def _row_groups(root: Root, segment: Segment) -> Iterator[pa.Table]:
    path = place(root, segment)
    try:
        with root.open(path) as opened_file, open_segment(opened_file) as parquet:
            if parquet.metadata.num_rows != segment.rows:
                raise CorruptLogError(
                    f"{path} holds {parquet.metadata.num_rows} messages, not {segment.rows}."
                )
            for group in range(parquet.num_row_groups):
                yield parquet.read_row_group(group, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise read_failure(error, root, path=path, read=checked_parquet.count_rows) from error


def check(root: Root, segment: Segment) -> None:
    """Read a whole segment to verify it.

    Raises:
        CorruptLogError: the segment is damaged.
        StorageError: the segment cannot be read at present.
    """
    for _ in _row_groups(root, segment):
        pass


class SegmentWriter:
    """Writes a range of the log as one segment per queue.

    Args:
        root: location of the archive.
        name_of: messages of topics without a name are skipped.
        epoch: in the names of the segments; 0: they have none.
    """

    def __init__(self, root: Root, name_of: NameOf, *, epoch: int = 0) -> None:
        self._root = root
        self._name_of = name_of
        self._epoch = epoch
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
                self._root, name, topic_id=topic_id, queue_id=queue_id, epoch=self._epoch
            )
        return found

    def _limit_pending(self) -> None:
        """Flush the largest buffers when many queues hold a little each."""
        pending = sum(queue.pending_bytes for queue in self._queues.values())
        if pending <= _ALL_PENDING_BYTES:
            return
        for queue in sorted(self._queues.values(), key=lambda queue: -queue.pending_bytes):
            pending -= queue.pending_bytes
            queue.flush()
            if pending <= _ALL_PENDING_BYTES // 2:
                return
