"""History in Parquet: files of events and snapshots of the state, beside the database.

``events/`` has what dispatch let go of, by log position; ``snapshots/`` the state tables as they
were. Queries read those that are registered, through two variables that each of them sets first,
in its own transaction: what a query sees of DuckDB's tables and of the files is one moment.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from rmq_pipeline.store.statements import named

EVENTS: Final = "events"
SNAPSHOTS: Final = "snapshots"
#: A file without rows: DuckDB reads no empty list of files. Hidden from globs.
NOTHING: Final = ".nothing.parquet"
#: A query that runs for longer may find a file gone, and fails.
GRACE_S: Final = 600.0
#: Events that are read to find one; 40 bytes each, about.
_ROW_GROUP: Final = 32_768


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state at a log position."""

    position: int
    at_ms: int
    rows: int


@dataclass(frozen=True, slots=True)
class KeptHistory:
    """What counts: position, at_ms, path of snapshots; path, positions, rows of files of events."""

    snapshots: pa.Table
    event_files: pa.Table


def let_in(root: duckdb.DuckDBPyConnection, home: Path) -> None:
    """Give a new database access to the folders of the history, and to no other file."""
    folders = []
    for name in (EVENTS, SNAPSHOTS):
        (home / name).mkdir(exist_ok=True)
        folders.append("'" + str(home / name).replace("'", "''") + "'")
    root.execute(named("allow_folders", folders=f"[{', '.join(folders)}]"))
    root.execute(named("forbid_files"))


def write_nothing(cursor: duckdb.DuckDBPyConnection, home: Path) -> None:
    """Make the files that stand for no history; the tables are there."""
    for folder, statement, params in (
        (EVENTS, "no_events", None),
        (SNAPSHOTS, "snapshot_rows", {"position": 0}),
    ):
        path = home / folder / NOTHING
        if not path.exists():
            columns = cursor.sql(named(statement), params=params).limit(0).to_arrow_table().schema
            unfinished = path.with_suffix(".unfinished")
            pq.write_table(columns.empty_table(), unfinished)
            unfinished.rename(path)


def use_files(cursor: duckdb.DuckDBPyConnection, home: Path) -> None:
    """Have the views of this connection read what is registered now."""
    for name in ("use_event_files", "use_snapshot_files"):
        cursor.execute(named(name), {"home": f"{home}/"})


def export_events(cursor: duckdb.DuckDBPyConnection, to_position: int, *, path: Path) -> int:
    """Write the table's events before a position to a file; how many there are."""
    return _write(cursor.sql(named("events_before"), params={"to_position": to_position}), path)


def merge_events(cursor: duckdb.DuckDBPyConnection, files: Sequence[Path], *, path: Path) -> int:
    """Write the events of several files to one; how many there are."""
    params = {"files": [str(file) for file in files]}
    return _write(cursor.sql(named("events_of_files"), params=params), path)


def export_snapshot(cursor: duckdb.DuckDBPyConnection, path: Path) -> Snapshot:
    """Write the state tables of this moment to a file."""
    cursor.begin()
    try:
        ((position, at_ms, *_),) = cursor.sql(named("state_reached")).fetchall()
        rows = _write(cursor.sql(named("snapshot_rows"), params={"position": position}), path)
        return Snapshot(position, at_ms, rows)
    finally:
        cursor.rollback()


def kept(cursor: duckdb.DuckDBPyConnection) -> KeptHistory:
    """What counts, as of one moment; oldest first."""
    cursor.begin()
    try:
        return KeptHistory(
            cursor.sql(named("kept_history")).to_arrow_table(),
            cursor.sql(named("event_files")).to_arrow_table(),
        )
    finally:
        cursor.rollback()


def events_since(cursor: duckdb.DuckDBPyConnection, position: int) -> int:
    """How many events there are from a position on, about."""
    ((count,),) = cursor.sql(named("events_since"), params={"position": position}).fetchall()
    return int(count)


class Sweep:
    """Deletes files of the history that do not count, when no query may still read them."""

    def __init__(self, home: Path) -> None:
        self._home = home
        #: When each was first found not to count. None: no query was asked before.
        self._since: dict[Path, float] | None = None

    def run(self, kept: KeptHistory) -> list[Path]:
        """What was deleted. ``kept`` is what counts, and nothing is being written."""
        counts = set(kept.snapshots.column("path").to_pylist())
        counts.update(kept.event_files.column("path").to_pylist())
        found = {
            file
            for folder in (EVENTS, SNAPSHOTS)
            for file in (self._home / folder).iterdir()
            if file.name != NOTHING and f"{folder}/{file.name}" not in counts
        }
        now = time.monotonic()
        since = self._since
        gone = sorted(
            file for file in found if since is None or now - since.get(file, now) >= GRACE_S
        )
        for file in gone:
            file.unlink()
        self._since = {file: (since or {}).get(file, now) for file in found.difference(gone)}
        return gone


def _write(found: duckdb.DuckDBPyRelation, path: Path) -> int:
    reader: pa.RecordBatchReader = found.to_arrow_reader(_ROW_GROUP)
    rows = 0
    with pq.ParquetWriter(path, reader.schema, compression="zstd") as file:
        for batch in reader:
            file.write_batch(batch)
            rows += batch.num_rows
    return rows
