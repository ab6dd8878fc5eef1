"""Sort of messages by message group, in the order of a walk and in bounded memory.

Messages that fit are sorted in memory. Otherwise they are partitioned by message group into files,
and each file is sorted by itself. A message group that does not fit alone is not sorted: the
messages of one queue are already in order.
"""

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.handling.group_walk import group_starts
from rmq_pipeline.message import hash64
from rmq_pipeline.spark.replay.reading import WALKED

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

Int64s = npt.NDArray[np.int64]


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
    tables: Iterable[pa.Table], *, folder: Path, files: int, depth: int = 0
) -> dict[int, GroupFile]:
    """Partition messages into files by message group; each file keeps their order.

    Returns:
        Number of the share -> its file; shares without messages are omitted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    by_share: dict[int, GroupFile] = {}
    writers: dict[int, pa.ipc.RecordBatchFileWriter] = {}
    try:
        for table in tables:
            which = shares(table, files, depth=depth)
            order = np.argsort(which, kind="stable")
            ordered = table.take(pa.array(order))
            found, starts = np.unique(which[order], return_index=True)
            stops = [*starts[1:].tolist(), len(order)]
            for share, start, stop in zip(found.tolist(), starts.tolist(), stops, strict=True):
                if share not in writers:
                    # Unique names, because a repeated attempt of the task writes files of its own.
                    path = str(folder / f"group-{share}-{secrets.token_hex(8)}.arrow")
                    by_share[share] = GroupFile(path)
                    writers[share] = pa.ipc.new_file(path, WALKED)
                part = ordered.slice(start, stop - start)
                by_share[share].note(part)
                writers[share].write_table(part)
    finally:
        for writer in writers.values():
            writer.close()
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
    """Yield the tables that ``partition`` wrote to a file, mapped into memory."""
    with pa.memory_map(path) as mapped:
        reader = pa.ipc.open_file(mapped)
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
