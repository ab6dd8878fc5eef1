"""History of keyed state: the state that each settle stored, and the message it includes last.

``<home>/state/<group_id>-<topic_id>/<from>-<to>.parquet`` holds the states that seal found in the
log between two positions of 20 digits. Its columns are those of HISTORY, then the consumer's own. A
state has ``queue_offset`` only if its settle also settled messages of the group; it is the last of
them.

A file is written before its range of the log counts as sealed. A file that begins at an unsealed
position was left by a seal that died, and is written again.
"""

import itertools
import logging
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rmq_pipeline import checked_parquet, durable_files
from rmq_pipeline.errors import StorageError
from rmq_pipeline.message import Int64s
from rmq_pipeline.state_columns import together
from rmq_pipeline.store.events import Delivery, Kind
from rmq_pipeline.store.log.commit_log import Section

log = logging.getLogger(__name__)

#: Columns of every row of the history; the consumer's own columns follow.
HISTORY: Final = pa.schema(
    [
        ("message_group", pa.string()),
        ("message_group_hash", pa.int64()),
        ("removed", pa.bool_()),
        ("position", pa.int64()),
        ("at_ms", pa.int64()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
    ]
)
#: Columns of a request: the first and the last message of a range, per message group.
PLACES: Final = pa.schema(
    [
        ("message_group", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("stored_at_ms", pa.int64()),
        ("last_queue_id", pa.int32()),
        ("last_queue_offset", pa.int64()),
    ]
)
_EVENTS, _KEYED_STATE = 2, 3
_NEW: Final = ".new"
#: Files of old states are merged when there are this many.
_EXPIRED_FILES: Final = 8


class Owner(NamedTuple):
    """The consumer group and topic to which a state belongs."""

    group_id: int
    topic_id: int

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return f"{self.group_id}-{self.topic_id}"


@dataclass(frozen=True, slots=True)
class _Settled:
    """The last message of each message group that a frame settled for a consumer group."""

    hashes: Int64s
    queue_id: npt.NDArray[np.int32]
    queue_offset: Int64s
    at_ms: int


def of_frames(frames: Iterable[tuple[int, list[Section]]]) -> dict[Owner, list[pa.Table]]:
    """Return the states in frames of the log, in order: tables of HISTORY and own columns."""
    found: dict[Owner, list[pa.Table]] = {}
    for _, sections in frames:
        for section in sections:
            if section.kind == _KEYED_STATE and section.batch.num_rows:
                owner = _owner(section.batch)
                found.setdefault(owner, []).append(_placed(section, sections, owner=owner))
    return found


def write(folder: Path, states: dict[Owner, list[pa.Table]], *, start: int, end: int) -> None:
    """Write the states of [start, end) of the log to disk.

    Raises:
        OSError: writing failed.
    """
    for owner, tables in states.items():
        own = folder / owner.folder
        durable_files.make_folder(own)
        for old in own.iterdir():
            if old.suffix == _NEW or _from(old) >= start:
                old.unlink()
        path = own / f"{start:020d}-{end:020d}.parquet"
        table = together(tables, fixed=HISTORY)
        try:
            _put(path, table)
        except (OSError, pa.ArrowException):
            writable = _writable(table, owner)
            if writable is table:
                raise
            _put(path, writable)
        durable_files.sync(folder)


def refusal(rows: pa.Table) -> str | None:
    """Return why Parquet cannot store such rows; None if it can.

    Args:
        rows: message_group_hash, and the consumer's columns.
    """
    try:
        ordered = _sortable(rows).sort_by("message_group_hash")
        checked_parquet.write(ordered, pa.MockOutputStream())
    except (OSError, pa.ArrowException) as error:
        return str(error)
    return None


def _sortable(table: pa.Table) -> pa.Table:
    """Cast string and binary views, which Arrow cannot sort, to strings and binary."""
    types = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    for at, column in enumerate(table.schema):
        if to := types.get(column.type):
            table = table.set_column(at, column.name, table.column(at).cast(to))
    return table


def _writable(table: pa.Table, owner: Owner) -> pa.Table:
    """Drop columns that Parquet cannot store; otherwise the log could never be sealed.

    An older version accepted such columns; settle now refuses them.
    """
    for name in table.column_names[len(HISTORY) :]:
        if why := refusal(table.select(["message_group_hash", name])):
            text = "Column %s of state %s is not kept in the history: %s."
            log.error(text, name, owner.folder, why.rstrip("."))
            table = table.drop_columns([name])
    return table


def expire(folder: Path, *, before_ms: int) -> int:
    """Of states older than a time, keep only the newest of each message group.

    Returns:
        The number of deleted rows.

    Raises:
        OSError: reading or writing failed; nothing was lost.
    """
    return sum(_expire(own, before_ms=before_ms) for own in folder.glob("*-*"))


def _expire(own: Path, *, before_ms: int) -> int:
    files = sorted(own.glob("*.parquet"))
    old = list(itertools.takewhile(lambda path: _newest_ms(path) < before_ms, files))
    if len(old) < _EXPIRED_FILES:
        return 0
    rows = together(map(checked_parquet.read, old), fixed=HISTORY)
    placed = rows.filter(pc.is_valid(rows["queue_offset"])).sort_by("position").combine_chunks()
    # The last of several rows for a message group wins.
    last = dict(zip(placed["message_group"].to_pylist(), range(placed.num_rows), strict=True))
    kept = placed.take(pa.array(last.values(), pa.int64()))
    path = own / f"{_from(old[0]):020d}-{old[-1].stem.partition('-')[2]}.parquet"
    _put(path, kept)
    # A crash here leaves rows twice, which changes no result.
    for each in old:
        if each != path:
            each.unlink()
    durable_files.sync(own)
    went: int = rows.num_rows - kept.num_rows
    return went


def _newest_ms(path: Path) -> int:
    """Return the largest at_ms of a file from its footer; 0 for a file without rows."""
    footer = pq.read_metadata(path)
    at = footer.schema.names.index("at_ms")
    groups = (footer.row_group(i).column(at).statistics for i in range(footer.num_row_groups))
    return max((int(facts.max) for facts in groups if facts.has_min_max), default=0)


def _put(path: Path, table: pa.Table) -> None:
    """Write a file of the history, synced."""
    unfinished = path.with_name(f".{path.name}{_NEW}")
    ordered = table.sort_by("message_group_hash")
    checked_parquet.write(ordered, unfinished, compression="zstd")
    durable_files.publish(unfinished, path)


def forget(folder: Path, *, groups: Collection[int], topics: Collection[int]) -> None:
    """Delete the history of all groups and topics that are not listed."""
    for own in folder.glob("*-*"):
        group_id, _, topic_id = own.name.partition("-")
        if int(group_id) not in groups or int(topic_id) not in topics:
            shutil.rmtree(own, ignore_errors=True)


def around(
    folder: Path,
    owner: Owner,
    *,
    sealed_to: int,
    unsealed: list[pa.Table],
    places: pa.Table,
    hashes: Int64s,
) -> tuple[pa.Table, pa.Table] | None:
    """Return the states of message groups before and after a range of their messages.

    Args:
        folder: folder of the history.
        owner: group and topic of the states.
        sealed_to: files that begin at or after this position are ignored.
        unsealed: result of ``of_frames`` for the log from that position on.
        places: PLACES, one row per message group.
        hashes: hashes of those message groups.

    Returns:
        Two tables of HISTORY and own columns. The first has the last state before each group's
        first message. The second has the first state after its last message was settled, or else
        the newest one. ``removed`` marks a group whose state was deleted. None if there never was
        any state.

    Raises:
        StorageError: a file cannot be read.
    """
    tables = [*_files(folder / owner.folder, sealed_to=sealed_to, hashes=hashes), *unsealed]
    if not tables:
        return None
    rows = together(tables, fixed=HISTORY).combine_chunks()
    asked = pc.fill_null(pc.index_in(rows["message_group"], places["message_group"]), -1)
    wanted = (asked.to_numpy() >= 0) & rows["queue_offset"].is_valid().to_numpy()
    rows = rows.filter(pa.array(wanted)).sort_by("position")
    before, after = _chosen(rows, places)
    return rows.take(pa.array(before)), rows.take(pa.array(after))


def _chosen(rows: pa.Table, places: pa.Table) -> tuple[Int64s, Int64s]:
    """Return the rows, sorted by position, that are the states before and after each place."""
    code = pc.index_in(rows["message_group"], places["message_group"]).to_numpy()
    queue, offset = rows["queue_id"].to_numpy(), rows["queue_offset"].to_numpy()
    first = {name: places[name].to_numpy()[code] for name in PLACES.names[1:]}
    earlier = np.where(
        queue == first["queue_id"],
        offset < first["queue_offset"],
        # A message group that has moved to another queue left this queue earlier.
        rows["at_ms"].to_numpy() <= first["stored_at_ms"],
    )
    later = (queue == first["last_queue_id"]) & (offset >= first["last_queue_offset"])
    n = places.num_rows
    last_before, first_after, newest = (np.full(n, -1, dtype=np.int64) for _ in range(3))
    at = np.arange(len(code))
    # NumPy keeps the last of several values assigned to one place.
    last_before[code[earlier]] = at[earlier]
    first_after[code[later][::-1]] = at[later][::-1]
    newest[code] = at
    after = np.where(first_after >= 0, first_after, newest)
    return last_before[last_before >= 0], after[after >= 0]


def _files(own: Path, *, sealed_to: int, hashes: Int64s) -> Iterator[pa.Table]:
    wanted = pc.field("message_group_hash").isin(hashes)
    for path in sorted(own.glob("*.parquet")):
        if _from(path) >= sealed_to:
            continue
        try:
            yield checked_parquet.scan(path, wanted)
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"{path} cannot be read: {error}.") from error


def _from(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _owner(batch: pa.RecordBatch) -> Owner:
    ids = batch.schema.metadata
    return Owner(int(ids[b"group_id"]), int(ids[b"topic_id"]))


def _placed(section: Section, sections: list[Section], *, owner: Owner) -> pa.Table:
    """Return a section's states, each with the last message of its group settled in the frame."""
    table = pa.Table.from_batches([section.batch]).replace_schema_metadata(None)
    n = table.num_rows
    settled = _settled(sections, owner)
    hashes = table["message_group_hash"].to_numpy()
    at = np.searchsorted(settled.hashes, hashes)
    known = np.zeros(n, dtype=bool)
    inside = at < len(settled.hashes)
    known[inside] = settled.hashes[at[inside]] == hashes[inside]
    places = pa.array(np.where(known, at, 0), mask=~known)
    taken = [
        pa.array(column).take(places) if len(column) else pa.nulls(n, type_)
        for column, type_ in (
            (settled.queue_id, pa.int32()),
            (settled.queue_offset, pa.int64()),
        )
    ]
    fixed = [
        *(table[name] for name in HISTORY.names[:3]),
        pa.repeat(pa.scalar(section.position, pa.int64()), n),
        pa.repeat(pa.scalar(settled.at_ms, pa.int64()), n),
        *taken,
    ]
    own = [name for name in table.column_names if name not in HISTORY.names]
    columns = [*fixed, *(table[name] for name in own)]
    return _sortable(pa.table(columns, names=[*HISTORY.names, *own]))


def _settled(sections: list[Section], owner: Owner) -> _Settled:
    parts: list[tuple[Int64s, npt.NDArray[np.int32], Int64s]] = []
    at_ms = 0
    for section in sections:
        if section.kind != _EVENTS or not section.batch.num_rows:
            continue
        column = {name: section.batch.column(name) for name in section.batch.schema.names}
        at_ms = column["at_ms"][0].as_py()
        kind = column["kind"].to_numpy()
        given_up = (column["delivery"].to_numpy() == Delivery.EXHAUSTED) & np.isin(
            kind, [Kind.RETRY, Kind.EXPIRE]
        )
        mine = (column["group_id"].to_numpy() == owner.group_id) & (
            column["topic_id"].to_numpy() == owner.topic_id
        )
        mine &= np.isin(kind, [Kind.ACK, Kind.ACK_AHEAD]) | given_up
        parts.append(
            (
                column["message_group_hash"].to_numpy()[mine],
                column["queue_id"].to_numpy()[mine],
                column["queue_offset"].to_numpy()[mine],
            )
        )
    if not parts:
        nothing = np.zeros(0, dtype=np.int64)
        return _Settled(nothing, nothing.astype(np.int32), nothing, at_ms)
    hashes, queues, offsets = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((offsets, hashes))
    last = np.ones(len(order), dtype=bool)
    last[:-1] = np.diff(hashes[order]) != 0
    kept = order[last]
    return _Settled(hashes[kept], queues[kept], offsets[kept], at_ms)
