"""Reads of a replay's tasks: messages in files, those to replay, in the order of the walk.

A task reads the files itself as Arrow: rows that pass through the JVM cost several times as much.

The messages are sorted by message group in bounded memory. Messages that fit are sorted in memory.
Otherwise they are partitioned by message group into files, and each file is sorted by itself. A
message group that does not fit alone is not sorted: the messages of one queue are already in order.
"""

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from rmq_pipeline import schema
from rmq_pipeline.archive.segment_file import open_segment
from rmq_pipeline.errors import IllegalOffsetError
from rmq_pipeline.handling.group_walk import group_starts
from rmq_pipeline.handling.handler import MESSAGES
from rmq_pipeline.message import hash64
from rmq_pipeline.spark.arrow_transport import unpack
from rmq_pipeline.spark.replay.sinks import HOUR_MS
from rmq_pipeline.spark.replay.topic_log import Range, Stored, check_reachable, listed
from rmq_pipeline.spark.replay.walk import BEHIND, RANGE, ROLE, WARM_UP
from rmq_pipeline.storage.place import at
from rmq_pipeline.storage.root import (
    Address,
    StorageRootError,
    below,
    is_uri,
    path_in,
    shown,
    split,
)

#: Columns of a walk: a handler's message, and its role.
WALKED: Final = pa.schema([*MESSAGES, (ROLE, pa.int32())])
#: Those columns that are stored in a file.
STORED: Final = [f.name for f in schema.READ if f.name != "queue_id"]
#: Approximate uncompressed bytes of the row groups read at once.
_READ_BYTES: Final = 8 << 20
#: A property with a time.
_NUMBER: Final = r"^\s*[+-]?\d{1,18}\s*$"

Mask = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]
#: Maximum number and approximate bytes of messages per chunk; a larger group takes several chunks.
CHUNK_ROWS: Final = 20_000
CHUNK_BYTES: Final = 64 << 20
#: Maximum bytes that a task sorts in memory; the sort needs twice as much.
SORTED_BYTES: Final = 128 << 20
#: Number of files per partitioning step.
_FILES_PER_STEP: Final = 16
#: Message groups still together after this many steps have the same hash.
_DEEPEST: Final = 20
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Selection of the messages to replay."""

    range: Range
    #: Folder of the topic, whose manifest lists the present files.
    root: str
    #: queue_id -> the first offset that the group has not examined; other queues are not read.
    cursors: dict[int, int]
    #: Arrow file of unsettled messages before the cursors; None if all are settled.
    open: str | None = None
    #: Arrow file of walk.STRETCH; None if the consumer keeps no state.
    stretches: str | None = None


def walked(files: list[Stored], wanted: Wanted) -> Iterator[pa.Table]:
    """Yield the selected messages with their roles as WALKED, in the order of the files."""
    choice = _Choice(wanted)
    # Messages before the range are selected by offset, whatever their time.
    pruned = wanted.stretches is None
    for stored in files:
        for table in _rows(stored, wanted, columns=STORED, pruned=pruned):
            chosen = choice.with_roles(_as_given(table, stored.queue_id))
            if chosen.num_rows:
                yield chosen


def in_range(files: list[Stored], wanted: Wanted, *, columns: list[str]) -> Iterator[pa.Table]:
    """Yield these columns, with queue_offset, of settled messages in the range, file by file."""
    choice = _Choice(wanted)
    read = [*dict.fromkeys([*columns, wanted.range.column or "properties"])]
    for stored in files:
        for table in _rows(stored, wanted, columns=read, pruned=True):
            mine = choice.settled(table, stored.queue_id) & choice.holds(table)
            yield table.filter(pa.array(mine)).select(columns)


def hours_behind(files: list[Stored], wanted: Wanted, *, ends: pa.Table) -> Int64s:
    """Return hours since 1970 behind the range with settled messages of some message groups.

    Args:
        files: files to read.
        wanted: the range, and the settled messages.
        ends: the last message in the range of each group: message_group, last_queue, last.
    """
    choice, found = _Choice(wanted), [np.zeros(0, dtype=np.int64)]
    groups = ends["message_group"].combine_chunks()
    read = ["message_group", "queue_offset", wanted.range.column or "properties"]
    for stored in files:
        for table in _rows(stored, wanted, columns=read, pruned=False):
            at = pc.index_in(table["message_group"], groups)
            known = pc.is_valid(at).to_numpy() & choice.settled(table, stored.queue_id)
            rows = pc.fill_null(at, 0).to_numpy()
            # A group that has moved continues in a queue that is not read before its end.
            known &= (ends["last_queue"].to_numpy()[rows] != stored.queue_id) | (
                table["queue_offset"].to_numpy() > ends["last"].to_numpy()[rows]
            )
            times = pc.drop_null(choice.time(table.filter(pa.array(known)))).to_numpy()
            found.append(np.unique(times[times >= wanted.range.to_ms] // HOUR_MS))
    return np.unique(np.concatenate(found))


def _rows(
    stored: Stored, wanted: Wanted, *, columns: list[str], pruned: bool
) -> Iterator[pa.Table]:
    """Yield a file's messages before the cursor, some row groups at a time.

    With ``pruned``, row groups outside the range are skipped.
    """
    stop = min(stored.end, wanted.cursors.get(stored.queue_id, 0))
    if stop <= stored.base:
        return
    time = wanted.range.column if pruned else None
    for path in _paths(stored, wanted.root):
        with _open(path) as file:
            for groups in _row_groups(file.metadata, time, wanted=wanted.range):
                table = file.read_row_groups(groups, columns=columns, use_threads=False)
                offsets = table["queue_offset"].to_numpy()
                low, high = np.searchsorted(offsets, (stored.base, stop)).tolist()
                if low < high:
                    yield table.slice(low, high - low)


def _open(path: str) -> pq.ParquetFile:
    files, inside = fs.FileSystem.from_uri(path)
    return open_segment(files.open_input_file(inside))


def _paths(stored: Stored, root: str) -> list[str]:
    """Return the present files of these messages: compaction may have replaced the file.

    Raises:
        IllegalOffsetError: the messages have expired meanwhile.
        ArchiveError: this process does not reach the archive.
        StorageRootError: nor the folder of the unsealed messages.
    """
    files, inside = fs.FileSystem.from_uri(stored.path)
    if files.get_file_info(inside).type == fs.FileType.File:
        return [stored.path]
    if not stored.path.startswith(f"{root.partition('?')[0] if is_uri(root) else root}/"):
        raise StorageRootError(
            f"{shown(stored.path)} does not exist on this machine; the driver wrote it on its own.",
            remedy="Place the sinks where the driver and Spark's tasks reach them: a replay's files"
            " lie there, too.",
        )
    paths, at = [], stored.base
    for segment in sorted(listed(root), key=lambda each: each.base):
        if segment.queue_id == stored.queue_id and segment.base <= at < segment.end:
            paths.append(path_in(root, segment.path))
            at = segment.end
    if at < stored.end:
        check_reachable(root)
        raise IllegalOffsetError(
            f"Offset {at} of queue {stored.queue_id} has expired during the replay."
        )
    return paths


def _row_groups(footer: pq.FileMetaData, time: str | None, *, wanted: Range) -> Iterator[list[int]]:
    """Yield lists of row groups to read at once, without those outside the range."""
    chosen: list[int] = []
    size = 0
    column = None if time is None else _index_of(footer, time)
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        facts = None if column is None else group.column(column).statistics
        if facts is not None and facts.has_min_max and not wanted.overlaps(facts.min, facts.max):
            continue
        chosen.append(number)
        size += group.total_byte_size
        if size >= _READ_BYTES:
            yield chosen
            chosen, size = [], 0
    if chosen:
        yield chosen


def _index_of(footer: pq.FileMetaData, column: str) -> int | None:
    if not footer.num_row_groups:
        return None
    group = footer.row_group(0)
    paths = [group.column(i).path_in_schema for i in range(group.num_columns)]
    return paths.index(column) if column in paths else None


def _as_given(table: pa.Table, queue_id: int) -> pa.Table:
    """Return the messages in the columns that a handler receives."""
    n = table.num_rows
    constants = {"queue_id": queue_id, "delivery_attempt": 1}
    columns = [
        pa.repeat(pa.scalar(constants[field.name], field.type), n)
        if field.name in constants
        else table[field.name].cast(field.type)
        for field in MESSAGES
    ]
    return pa.table(columns, schema=MESSAGES)


class _Choice:
    """Selects messages, and assigns their roles."""

    def __init__(self, wanted: Wanted) -> None:
        self._range = wanted.range
        self._open: dict[int, Int64s] = {}
        if wanted.open is not None:
            left = unpack(None, wanted.open)
            queues, offsets = left["queue_id"].to_numpy(), left["queue_offset"].to_numpy()
            self._open = {q: offsets[queues == q] for q in np.unique(queues).tolist()}
        self._stretches = None if wanted.stretches is None else unpack(None, wanted.stretches)

    def settled(self, table: pa.Table, queue_id: int) -> Mask:
        """Return a mask of a queue's messages that are settled."""
        if queue_id not in self._open:
            return np.ones(table.num_rows, dtype=np.bool_)
        found: Mask = ~np.isin(table["queue_offset"].to_numpy(), self._open[queue_id])
        return found

    def time(self, table: pa.Table) -> pa.ChunkedArray:
        """Return the partition times of messages; null if a message has none."""
        if self._range.column is not None:
            return table[self._range.column]
        texts = pc.map_lookup(table["properties"], self._range.partition_time, "first")
        numbers = pc.if_else(pc.match_substring_regex(texts, _NUMBER), texts, None)
        numbers = pc.utf8_ltrim(pc.utf8_trim_whitespace(numbers), characters="+")
        return numbers.cast(pa.int64())

    def holds(self, table: pa.Table) -> Mask:
        """Return a mask of messages whose partition time is in the range."""
        wanted, time = self._range, self.time(table)
        mine = pc.and_(pc.greater_equal(time, wanted.from_ms), pc.less(time, wanted.to_ms))
        found: Mask = pc.fill_null(mine, False).to_numpy()
        return found

    def with_roles(self, messages: pa.Table) -> pa.Table:
        """Return WALKED of one queue: messages of the range, and those before and behind it."""
        queue_id = messages["queue_id"][0].as_py()
        settled, holds = self.settled(messages, queue_id), self.holds(messages)
        role = np.full(messages.num_rows, RANGE, dtype=np.int32)
        keep = holds
        if self._stretches is not None and self._stretches.num_rows:
            leads, before = self._leads(messages, queue_id)
            keep = holds | leads
            role = np.where(holds, RANGE, np.where(before, WARM_UP, BEHIND)).astype(np.int32)
        keep = keep & settled
        found = messages.append_column(ROLE, pa.array(role))
        return found if keep.all() else found.filter(pa.array(keep))

    def _leads(self, messages: pa.Table, queue_id: int) -> tuple[Mask, Mask]:
        """Return masks: messages on their group's stretch, and those before its last in range."""
        table = self._stretches
        assert table is not None
        at = pc.index_in(messages["message_group"], table["message_group"].combine_chunks())
        known: Mask = pc.is_valid(at).to_numpy()
        rows = pc.fill_null(at, 0).to_numpy()
        of: dict[str, Any] = {name: table[name].to_numpy()[rows] for name in table.column_names[1:]}
        offset = messages["queue_offset"].to_numpy()
        here = (messages["stored_at_ms"].to_numpy(), np.full(len(offset), queue_id), offset)
        before = _less(here, (of["last_stored"], of["last_queue"], of["last"]))
        alone = (queue_id == of["last_queue"]) & (offset > of["low"]) & (offset <= of["high"])
        several = before & _less((of["low_stored"], of["low_queue"], of["low"]), here)
        return known & np.where(of["several"], several, alone), before


def _less(one: tuple[Int64s, ...], other: tuple[Int64s, ...]) -> Mask:
    """Compare places lexicographically; True where the first is smaller."""
    found: Mask = np.zeros(len(one[-1]), dtype=np.bool_)
    for left, right in zip(reversed(one), reversed(other), strict=True):
        found = (left < right) | ((left == right) & found)
    return found


def chunks(
    tables: Iterable[pa.Table], *, rows: int = CHUNK_ROWS
) -> Iterator[tuple[pa.Table, bool]]:
    """Yield sorted messages in tables of whole message groups; True: the last group may continue.

    Only a group of more than ``rows`` messages or CHUNK_BYTES is divided. A table with True
    contains one group, which may nevertheless be complete.
    """
    pending: list[pa.Table] = []
    n = size = 0
    for table in tables:
        for start in range(0, table.num_rows, rows):
            part = table.slice(start, rows)
            pending.append(part)
            n += part.num_rows
            size += part.nbytes
            if n < rows and size < CHUNK_BYTES:
                continue
            whole = pa.concat_tables(pending).combine_chunks()
            last = int(group_starts(whole["message_group"])[-1])
            if last:
                yield whole.slice(0, last), False
                rest = whole.slice(last)
                pending, n, size = [rest], rest.num_rows, rest.nbytes
            else:
                yield whole, True
                pending, n, size = [], 0, 0
    if n:
        yield pa.concat_tables(pending), False


def sort_by_group(
    tables: Iterator[pa.Table], *, folder: Path, most: int = SORTED_BYTES, depth: int = 0
) -> Iterator[pa.Table]:
    """Yield messages of WALKED with groups contiguous, each group in the order it was stored.

    Args:
        tables: messages of one queue in offset order, or of several queues.
        folder: folder for temporary files; the caller deletes it after a failure.
        most: maximum bytes to sort in memory.
        depth: how often the messages were partitioned before.
    """
    held: list[pa.Table] = []
    size = 0
    for table in tables:
        held.append(table)
        size += table.nbytes
        if size > most and depth < _DEEPEST:
            by_share = partition(
                chain(held, tables), folder=folder, files=_FILES_PER_STEP, depth=depth
            )
            held = []
            for each in by_share.values():
                if each.alone:
                    yield from _by_queue(each.path)
                else:
                    deeper = depth + 1
                    again = tables_of(each.path)
                    yield from sort_by_group(again, folder=folder, most=most, depth=deeper)
                Path(each.path).unlink()
            return
    if held:
        yield by_group(pa.concat_tables(held))


def by_group(messages: pa.Table) -> pa.Table:
    """Sort by message group, and each group by order."""
    messages = messages.combine_chunks()
    encoded = messages["message_group"].combine_chunks().dictionary_encode()
    group = pc.fill_null(encoded.indices, -1).to_numpy()
    queue = messages["queue_id"].to_numpy()
    if (queue == queue[0]).all():
        order = np.argsort(group, kind="stable")
    else:
        stored_at, offset = (messages[n].to_numpy() for n in ("stored_at_ms", "queue_offset"))
        order = np.lexsort((offset, queue, stored_at, group))
    return messages.take(pa.array(order))


@dataclass(slots=True)
class GroupFile:
    """Messages of some groups in an Arrow file."""

    path: str
    rows: int = 0
    #: stored_at_ms of the first message.
    first_ms: int = 0
    #: True if all messages have the same message group.
    alone: bool = True
    _group: str | None = None

    def note(self, messages: pa.Table) -> None:
        """Record messages that were written to the file."""
        groups = pc.unique(messages["message_group"]).to_pylist()
        if not self.rows:
            self.first_ms, self._group = messages["stored_at_ms"][0].as_py(), groups[0]
        self.alone = self.alone and groups == [self._group]
        self.rows += messages.num_rows


#: Columns in which a task reports its files to the driver; ``share`` is the number of the share.
GROUP_FILES: Final = pa.schema(
    [("share", pa.int32()), ("path", pa.string()), ("first_ms", pa.int64())]
)


def partition(
    tables: Iterable[pa.Table], *, folder: Address, files: int, depth: int = 0
) -> dict[int, GroupFile]:
    """Partition messages into files by message group; each file keeps their order.

    Returns:
        Number of the share -> its file; shares without messages are omitted.
    """
    root = at(folder)
    by_share: dict[int, GroupFile] = {}
    writers: dict[int, pa.ipc.RecordBatchFileWriter] = {}
    with ExitStack() as opened:
        for table in tables:
            which = shares(table, files, depth=depth)
            order = np.argsort(which, kind="stable")
            ordered = table.take(pa.array(order))
            found, starts = np.unique(which[order], return_index=True)
            stops = [*starts[1:].tolist(), len(order)]
            for share, start, stop in zip(found.tolist(), starts.tolist(), stops, strict=True):
                if share not in writers:
                    # Unique names, because a repeated attempt of the task writes files of its own.
                    name = f"group-{share}-{secrets.token_hex(8)}.arrow"
                    by_share[share] = GroupFile(str(below(folder, name)))
                    stream = opened.enter_context(root.create(name))
                    writers[share] = opened.enter_context(pa.ipc.new_file(stream, WALKED))
                part = ordered.slice(start, stop - start)
                by_share[share].note(part)
                writers[share].write_table(part)
    return by_share


def shares(messages: pa.Table, n: int, *, depth: int = 0) -> Int64s:
    """Return the share in [0, n) of each message: one share per message group."""
    groups = messages["message_group"].combine_chunks()
    hashes = hash64(groups).view(np.uint64).copy()
    # Messages without a message group may go to any share.
    strangers = pc.is_null(groups).to_numpy(zero_copy_only=False)
    hashes[strangers] = messages["queue_offset"].to_numpy()[strangers].view(np.uint64)
    mixed = (hashes ^ np.uint64(depth)) * _MIX
    mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX
    chosen: Int64s = ((mixed >> np.uint64(33)) % np.uint64(n)).astype(np.int64)
    return chosen


def tables_of(path: str) -> Iterator[pa.Table]:
    """Yield the tables that ``partition`` wrote to a file, mapped into memory if it is local."""
    folder, name = split(path) if is_uri(path) else os.path.split(path)
    reader = pa.ipc.open_file(at(folder).load(name))
    for i in range(reader.num_record_batches):
        yield pa.Table.from_batches([reader.get_batch(i)])


def _by_queue(path: str) -> Iterator[pa.Table]:
    """Yield one message group that is too large to be sorted, queue by queue.

    A group that has moved to another queue does not return to the earlier one.
    """
    firsts: dict[int, int] = {}
    for table in tables_of(path):
        queues, first = np.unique(table["queue_id"].to_numpy(), return_index=True)
        for queue, row in zip(queues.tolist(), first.tolist(), strict=True):
            firsts.setdefault(queue, table["stored_at_ms"][row].as_py())
    for queue in sorted(firsts, key=lambda each: (firsts[each], each)):
        for table in tables_of(path):
            mine = table.filter(pc.equal(table["queue_id"], queue))
            if mine.num_rows:
                yield mine
