"""Indexes of keys and message ids: for each segment, the row groups that may hold one.

An index is an Arrow IPC file with one row per hash and row group. ``hash`` is the upper 32 bits of
the hash of a key or an id, ascending; ``row_group`` is its row group. Ascending ids, such as those
the broker generates, need no hashes: the metadata ``runs`` lists their row groups, each with its
first id. The metadata ``crc32`` is the checksum of ``runs`` and both columns. Hashes may collide,
so the reader compares the text.
"""

import bisect
import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.message import Int64s, hash64
from rmq_pipeline.storage.root import Root

SCHEMA: Final = pa.schema([("hash", pa.uint32()), ("row_group", pa.uint16())])
_RUNS: Final = b"runs"
_CHECKSUM: Final = b"crc32"
#: Mixed into the hash of an id, so that a key with the same text has another hash.
_ID: Final = np.uint32(0x9E3779B9)
#: Indexes that stay open; local ones are memory-mapped, so the system can reclaim their memory.
_OPEN: Final = 512

_Hashes = npt.NDArray[np.uint32]


class _Run(NamedTuple):
    """Ascending ids: the first row group, the last id, and the first id of each row group."""

    row_group: int
    last: str
    firsts: list[str]


@dataclass(slots=True)
class Collector:
    """Builds the index of a segment while the segment is written."""

    _parts: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    _runs: list[_Run] = field(default_factory=list)

    def add(self, table: pa.Table, *, cuts: Sequence[int], row_group: int) -> None:
        """Add the rows of the row groups from ``row_group`` on, which begin at ``cuts``."""
        groups = row_group + np.searchsorted(cuts, np.arange(table.num_rows), side="right") - 1
        keys = table.column("keys").combine_chunks()
        if keys.null_count < len(keys):
            texts, rows = pc.list_flatten(keys), pc.list_parent_indices(keys).to_numpy()
            self._note(_short(hash64(texts)), groups[rows])
        ids = table.column("message_id").combine_chunks()
        if _ascends(ids):
            self._extend(ids, cuts=cuts, row_group=row_group)
        else:
            self._note(_short(hash64(ids)) ^ _ID, groups)

    def _note(self, hashes: _Hashes, groups: Int64s) -> None:
        self._parts.append(np.unique(hashes.astype(np.uint64) << 16 | groups.astype(np.uint64)))

    def _extend(self, ids: pa.StringArray, *, cuts: Sequence[int], row_group: int) -> None:
        firsts = [ids[at].as_py() for at in cuts[:-1]]
        last = ids[len(ids) - 1].as_py()
        before = self._runs[-1] if self._runs else None
        goes_on = before is not None and before.row_group + len(before.firsts) == row_group
        if before is not None and goes_on and before.last < firsts[0]:
            firsts = before.firsts + firsts
            self._runs[-1] = _Run(before.row_group, last, firsts)
        else:
            self._runs.append(_Run(row_group, last, firsts))

    def table(self) -> pa.Table:
        """Return the index as a table of SCHEMA with its metadata."""
        parts = self._parts or [np.zeros(0, np.uint64)]
        entries = np.unique(np.concatenate(parts))
        columns: list[npt.NDArray[Any]] = [
            (entries >> 16).astype(np.uint32),
            (entries & 0xFFFF).astype(np.uint16),
        ]
        runs = json.dumps(self._runs).encode()
        known = SCHEMA.with_metadata({_RUNS: runs, _CHECKSUM: _checksum(runs, *columns)})
        return pa.table([pa.array(column) for column in columns], schema=known)


def write(root: Root, path: str, *, index: pa.Table) -> None:
    """Write an index to a file and sync it."""
    with root.create(path) as sink, pa.ipc.new_file(sink, index.schema) as file:
        file.write_table(index)
    root.sync(path)


class _Index:
    """An open index."""

    def __init__(self, content: pa.Buffer) -> None:
        table = pa.ipc.open_file(content).read_all()
        runs = table.schema.metadata[_RUNS]
        self._runs = [_Run(*run) for run in json.loads(runs)]
        self._hash = table.column("hash").combine_chunks().to_numpy()
        self._row_group = table.column("row_group").combine_chunks().to_numpy()
        expected = table.schema.metadata.get(_CHECKSUM)
        # Indexes of older versions have no checksum.
        if expected is not None and expected != _checksum(runs, self._hash, self._row_group):
            raise ValueError("the index does not match its checksum")

    def groups(self, hashed: np.uint32) -> set[int]:
        start, stop = (
            int(np.searchsorted(self._hash, hashed, side=side)) for side in ("left", "right")
        )
        return set(self._row_group[start:stop].tolist())

    def groups_with_id(self, message_id: str) -> set[int]:
        found = self.groups(_short_of(message_id) ^ _ID)
        for first, last, firsts in self._runs:
            if firsts[0] <= message_id <= last:
                found.add(first + bisect.bisect_right(firsts, message_id) - 1)
        return found


class KeyIndexes:
    """Cache of the open indexes of an archive. Thread-safe."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._open: OrderedDict[Segment, _Index] = OrderedDict()

    def row_groups(
        self, segment: Segment, *, key: str | None, message_id: str | None
    ) -> list[int] | None:
        """Return the row groups that may hold messages with this key and this id, ascending.

        Returns:
            None if the segment has no index, or a damaged one: any row group may hold them.
        """
        index = self._index(segment)
        if index is None:
            return None
        sets = []
        if key is not None:
            sets.append(index.groups(_short_of(key)))
        if message_id is not None:
            sets.append(index.groups_with_id(message_id))
        return sorted(set.intersection(*sets))

    def forget(self, segments: Sequence[Segment]) -> None:
        """Close the indexes of deleted segments."""
        with self._lock:
            for segment in segments:
                self._open.pop(segment, None)

    def _index(self, segment: Segment) -> _Index | None:
        with self._lock:
            found = self._open.get(segment)
            if found is not None:
                self._open.move_to_end(segment)
                return found
        try:
            found = _Index(self._root.load(segment.index))
        except (OSError, ValueError, KeyError, pa.ArrowException):
            return None
        with self._lock:
            self._open[segment] = found
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return found


class OneIndex:
    """The index of one segment, for readers that have no ``Root``."""

    def __init__(self, content: pa.Buffer) -> None:
        """Decode the content of an index file.

        Raises:
            OSError, ValueError, KeyError, pa.ArrowException: it is damaged.
        """
        self._index = _Index(content)

    def with_keys(self, keys: Sequence[str]) -> set[int]:
        """Return the row groups that may hold messages with all of these keys, at least one."""
        return set.intersection(*(self._index.groups(_short_of(key)) for key in keys))

    def with_id(self, message_id: str) -> set[int]:
        """Return the row groups that may hold the message with this id."""
        return self._index.groups_with_id(message_id)


def check(root: Root, path: str) -> None:
    """Check that an index is readable and matches its checksum.

    Raises:
        OSError, ValueError, KeyError, pa.ArrowException: it cannot be read, or is damaged.
    """
    _Index(root.load(path))


def _checksum(runs: bytes, *columns: npt.NDArray[Any]) -> bytes:
    # Late: `dg` imports the components, also where only the client and Dagster are installed.
    from isal import isal_zlib

    crc = isal_zlib.crc32(runs)
    for column in columns:
        crc = isal_zlib.crc32(np.ascontiguousarray(column), crc)
    return b"%08x" % crc


def _ascends(ids: pa.StringArray) -> bool:
    if ids.null_count:
        return False
    rises = pc.less(ids.slice(0, len(ids) - 1), ids.slice(1))
    return len(ids) == 1 or bool(pc.all(rises).as_py())


def _short(hashes: Int64s) -> _Hashes:
    upper: _Hashes = (hashes.view(np.uint64) >> np.uint64(32)).astype(np.uint32)
    return upper


@functools.lru_cache(maxsize=64)
def _short_of(text: str) -> np.uint32:
    return np.uint32(_short(hash64(pa.array([text], pa.string())))[0])
