"""Where keys and message ids are: beside each segment, the row groups to look into.

An index is an Arrow IPC file with a row for each hash and row group it is in: ``hash``, the upper
32 bits of the hash of a key or an id, ascending, and ``row_group``. Ids that ascend, as those do
that a broker makes, need no hashes: the metadata ``runs`` says which row groups they run through,
with the first id of each. A hash may lead to a row group without the text: who looks it up
compares.
"""

import bisect
import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.archive.root import Root
from rmq_pipeline.archive.segment import Segment
from rmq_pipeline.message import Int64s, hash64

SCHEMA: Final = pa.schema([("hash", pa.uint32()), ("row_group", pa.uint16())])
_RUNS: Final = b"runs"
#: Told apart from a key of the same text.
_ID: Final = np.uint32(0x9E3779B9)
#: Indexes that stay open; a mapped one takes no memory that the system cannot have back.
_OPEN: Final = 512

_Hashes = npt.NDArray[np.uint32]


class _Run(NamedTuple):
    """Ascending ids: the first row group, the last id, the first id of each row group."""

    row_group: int
    last: str
    firsts: list[str]


@dataclass(slots=True)
class Collector:
    """Takes in the rows of a segment while it is written."""

    _parts: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    _runs: list[_Run] = field(default_factory=list)

    def add(self, table: pa.Table, *, cuts: Sequence[int], row_group: int) -> None:
        """Take in rows that become the row groups from ``row_group`` on, cut at these rows."""
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
        """The index."""
        parts = self._parts or [np.zeros(0, np.uint64)]
        entries = np.unique(np.concatenate(parts))
        columns = [(entries >> 16).astype(np.uint32), (entries & 0xFFFF).astype(np.uint16)]
        known = SCHEMA.with_metadata({_RUNS: json.dumps(self._runs)})
        return pa.table([pa.array(column) for column in columns], schema=known)


def write(root: Root, path: str, *, index: pa.Table) -> None:
    """Put an index into a file, on disk."""
    with root.create(path) as sink, pa.ipc.new_file(sink, index.schema) as file:
        file.write_table(index)
    root.sync(path)


class _Index:
    """An open index."""

    def __init__(self, content: pa.Buffer) -> None:
        table = pa.ipc.open_file(content).read_all()
        self._runs = [_Run(*run) for run in json.loads(table.schema.metadata[_RUNS])]
        self._hash = table.column("hash").combine_chunks().to_numpy()
        self._row_group = table.column("row_group").combine_chunks().to_numpy()

    def groups(self, hashed: np.uint32) -> set[int]:
        start, stop = (
            int(np.searchsorted(self._hash, hashed, side=side)) for side in ("left", "right")
        )
        return set(self._row_group[start:stop].tolist())

    def groups_of_run(self, message_id: str) -> set[int]:
        found = set()
        for first, last, firsts in self._runs:
            if firsts[0] <= message_id <= last:
                found.add(first + bisect.bisect_right(firsts, message_id) - 1)
        return found


class KeyIndexes:
    """The indexes of an archive. For any thread."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._open: OrderedDict[Segment, _Index] = OrderedDict()

    def row_groups(
        self, segment: Segment, *, key: str | None, message_id: str | None
    ) -> list[int] | None:
        """The row groups in which messages with this key and this id may be, ascending.

        None when that is not known: the segment has no index, or a damaged one.
        """
        index = self._index(segment)
        if index is None:
            return None
        sets = []
        if key is not None:
            sets.append(index.groups(_short_of(key)))
        if message_id is not None:
            hashed = _short_of(message_id) ^ _ID
            sets.append(index.groups(hashed) | index.groups_of_run(message_id))
        return sorted(set.intersection(*sets))

    def forget(self, segments: Sequence[Segment]) -> None:
        """These segments are gone."""
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
