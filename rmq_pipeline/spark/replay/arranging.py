"""Messages of many groups, brought into the order of a walk, in bounded memory.

What fits is sorted in memory. What does not is dealt out to files by message group, and each file
is arranged in its turn. A message group that does not fit alone is walked as it comes: in one queue
it is in order already.
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

#: Messages walked at a time, and about how large they are; a longer group takes several steps.
CHUNK_ROWS: Final = 20_000
CHUNK_BYTES: Final = 64 << 20
#: What a task sorts in memory, twice.
SORTED_BYTES: Final = 128 << 20
#: Files that messages are dealt out to at a time.
_DEALT: Final = 16
#: Message groups that are together after so many times have one hash.
_DEEPEST: Final = 20
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)

Int64s = npt.NDArray[np.int64]


def chunks(
    tables: Iterable[pa.Table], *, rows: int = CHUNK_ROWS
) -> Iterator[tuple[pa.Table, bool]]:
    """Sorted messages in tables of whole message groups; True: the last group may go on.

    Only a group of more than ``rows`` messages, or of as many bytes, is ever cut. A table that says
    True has one group, which may end with it all the same.
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


def arranged(
    tables: Iterator[pa.Table], *, folder: Path, most: int = SORTED_BYTES, depth: int = 0
) -> Iterator[pa.Table]:
    """Messages of WALKED so that those of a group are adjacent, in the order they were stored.

    Args:
        tables: of one queue in the order of its offsets, or of several queues.
        folder: for files, which somebody else deletes should this not end.
        most: bytes that are sorted in memory.
        depth: how often these were dealt out before.
    """
    held: list[pa.Table] = []
    size = 0
    for table in tables:
        held.append(table)
        size += table.nbytes
        if size > most and depth < _DEEPEST:
            dealt = deal(chain(held, tables), folder=folder, files=_DEALT, depth=depth)
            held = []
            for each in dealt.values():
                if each.alone:
                    yield from _by_queue(each.path)
                else:
                    deeper = depth + 1
                    again = stored(each.path)
                    yield from arranged(again, folder=folder, most=most, depth=deeper)
                Path(each.path).unlink()
            return
    if held:
        yield by_group(pa.concat_tables(held))


def by_group(messages: pa.Table) -> pa.Table:
    """Sorted by message group, and in each by order."""
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
class Dealt:
    """Messages of some groups in an Arrow file."""

    path: str
    rows: int = 0
    #: When the first of them was stored.
    first_ms: int = 0
    #: All are of one message group.
    alone: bool = True
    _group: str | None = None

    def note(self, messages: pa.Table) -> None:
        """These are in it, too."""
        groups = pc.unique(messages["message_group"]).to_pylist()
        if not self.rows:
            self.first_ms, self._group = messages["stored_at_ms"][0].as_py(), groups[0]
        self.alone = self.alone and groups == [self._group]
        self.rows += messages.num_rows


#: What is told of ``Dealt``, and of which share.
DEALT: Final = pa.schema([("share", pa.int32()), ("path", pa.string()), ("first_ms", pa.int64())])


def deal(
    tables: Iterable[pa.Table], *, folder: Path, files: int, depth: int = 0
) -> dict[int, Dealt]:
    """Write messages to files, those of a group to the same one, in their order.

    Returns:
        Which of the ``files`` -> what is in it; none of those without messages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dealt: dict[int, Dealt] = {}
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
                    # An attempt that is made again writes files of its own.
                    path = str(folder / f"dealt-{share}-{secrets.token_hex(8)}.arrow")
                    dealt[share] = Dealt(path)
                    writers[share] = pa.ipc.new_file(path, WALKED)
                part = ordered.slice(start, stop - start)
                dealt[share].note(part)
                writers[share].write_table(part)
    finally:
        for writer in writers.values():
            writer.close()
    return dealt


def shares(messages: pa.Table, n: int, *, depth: int = 0) -> Int64s:
    """Which of ``n`` shares each message belongs to: all of a group to one."""
    groups = messages["message_group"].combine_chunks()
    hashes = hash64(groups).view(np.uint64).copy()
    # Messages without a group are strangers, and go anywhere.
    strangers = pc.is_null(groups).to_numpy(zero_copy_only=False)
    hashes[strangers] = messages["queue_offset"].to_numpy()[strangers].view(np.uint64)
    mixed = (hashes ^ np.uint64(depth)) * _MIX
    mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX
    chosen: Int64s = ((mixed >> np.uint64(33)) % np.uint64(n)).astype(np.int64)
    return chosen


def stored(path: str) -> Iterator[pa.Table]:
    """What ``deal`` wrote to a file, a part at a time; mapped into memory."""
    with pa.memory_map(path) as mapped:
        reader = pa.ipc.open_file(mapped)
        for i in range(reader.num_record_batches):
            yield pa.Table.from_batches([reader.get_batch(i)])


def _by_queue(path: str) -> Iterator[pa.Table]:
    """One message group that is too large to be sorted.

    It has left a queue for good when it goes on in another one.
    """
    firsts: dict[int, int] = {}
    for table in stored(path):
        queues, first = np.unique(table["queue_id"].to_numpy(), return_index=True)
        for queue, row in zip(queues.tolist(), first.tolist(), strict=True):
            firsts.setdefault(queue, table["stored_at_ms"][row].as_py())
    for queue in sorted(firsts, key=lambda each: (firsts[each], each)):
        for table in stored(path):
            mine = table.filter(pc.equal(table["queue_id"], queue))
            if mine.num_rows:
                yield mine
