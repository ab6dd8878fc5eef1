"""History in Parquet: files of events and snapshots of the state, next to the database.

``events/`` contains the events that dispatch deleted from the database, by log position.
``snapshots/`` contains copies of the state tables. Queries read the registered files through two
variables. Each query compares both with the registered files in its own transaction, and sets them
if they differ. It therefore sees tables and files as of the same moment.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from rmq_pipeline import checked_parquet, durable_files
from rmq_pipeline.store.statements import named

EVENTS: Final = "events"
SNAPSHOTS: Final = "snapshots"
#: A file without rows, because DuckDB cannot read an empty list of files. Globs skip it.
NOTHING: Final = ".nothing.parquet"
#: A query that runs longer may find a file deleted, and fail.
GRACE_S: Final = 600.0
#: Number of events read to find one; about 40 bytes each.
_ROW_GROUP: Final = 32_768


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Position, time and row count of a state snapshot."""

    position: int
    at_ms: int
    rows: int


@dataclass(frozen=True, slots=True)
class KeptHistory:
    """Registered snapshots (position, at_ms, path) and event files (path, positions, rows)."""

    snapshots: pa.Table
    event_files: pa.Table


def let_in(root: duckdb.DuckDBPyConnection, home: Path) -> None:
    """Allow a new database to read the history folders and no other file."""
    folders = []
    for name in (EVENTS, SNAPSHOTS):
        durable_files.make_folder(home / name)
        folders.append("'" + str(home / name).replace("'", "''") + "'")
    root.execute(named("allow_folders", folders=f"[{', '.join(folders)}]"))
    root.execute(named("forbid_files"))


def write_nothing(cursor: duckdb.DuckDBPyConnection, home: Path, *, replace: bool = False) -> bool:
    """Create the empty files that stand for no history; the tables must exist.

    Args:
        replace: the tables may have more columns than when a file was written.

    Returns:
        True if other files of the history lack columns that the tables have.
    """
    lacking = False
    for folder, statement, params in (
        (EVENTS, "no_events", None),
        (SNAPSHOTS, "snapshot_rows", {"position": 0}),
    ):
        path = home / folder / NOTHING
        if replace or not _is_whole(path):
            columns = cursor.sql(named(statement), params=params).limit(0).to_arrow_table().schema
            lacking |= replace and _lacks(home / folder, columns.names)
            unfinished = path.with_suffix(".unfinished")
            checked_parquet.write(columns.empty_table(), unfinished)
            durable_files.publish(unfinished, path)
    return lacking


def _lacks(folder: Path, columns: Sequence[str]) -> bool:
    """Return True if a file in the folder has fewer columns, or cannot be read."""
    for file in folder.glob("*.parquet"):
        try:
            if set(columns) - set(pq.read_schema(file).names):
                return True
        except (OSError, ValueError):  # a damaged footer, which is for its readers to tell
            return True
    return False


def _is_whole(path: Path) -> bool:
    """Return False if the file is missing, or truncated because it was not synced."""
    try:
        return bool(pq.read_metadata(path).num_rows == 0)
    except (OSError, pa.ArrowException):
        return False


class FilesInUse:
    """The registered files that the views of each connection read."""

    def __init__(self, home: Path, *, fetch: Callable[[str], None] | None = None) -> None:
        """Prepare.

        Args:
            fetch: fetches a registered file that the home lacks, by its path; None: it has all.
        """
        self._home = home
        self._fetch = fetch
        self._used: dict[duckdb.DuckDBPyConnection, list[tuple[Any, ...]]] = {}
        #: Fetched files that lack columns of the tables, as an older version wrote them.
        self._older: dict[str, bool] = {}

    def update(self, cursor: duckdb.DuckDBPyConnection, *, may_fetch: bool = True) -> None:
        """Make the views of this connection read the files registered now.

        The variables are set only after a change: setting them takes as long as a small query.

        Args:
            may_fetch: False: leave out files that the home lacks and could fetch.

        Raises:
            StorageError: the home lacks a file, and ``fetch`` cannot get it.
        """
        found = cursor.execute(named("history_in_use")).fetchall()
        if self._used.get(cursor) == found:
            return
        self._used.pop(cursor, None)
        paths: dict[str, list[str]] = {EVENTS: [], SNAPSHOTS: []}
        for folder, path, _ in found:
            if folder is not None:
                if self._fetch is not None:
                    if not may_fetch and not (self._home / path).exists():
                        continue
                    self._fetch(path)
                paths[folder].append(str(self._home / path))
        for folder, statement in (
            (EVENTS, "use_event_files"),
            (SNAPSHOTS, "use_snapshot_files"),
        ):
            files = [str(self._home / folder / NOTHING), *paths[folder]]
            cursor.execute(named(statement), {"files": files})
        first = min((first for folder, _, first in found if folder is not None), default=None)
        differ = first is not None and any(
            since > first for folder, _, since in found if folder is None
        )
        differ |= self._fetch is not None and self._has_older(paths)
        cursor.execute(named("use_older_columns"), {"differ": differ})
        if may_fetch:
            self._used[cursor] = found

    def _has_older(self, paths: Mapping[str, Sequence[str]]) -> bool:
        for folder, files in paths.items():
            columns = set(pq.read_schema(self._home / folder / NOTHING).names)
            for file in files:
                if file not in self._older:
                    self._older[file] = bool(columns - set(pq.read_schema(file).names))
        return any(self._older[file] for files in paths.values() for file in files)


def export_events(cursor: duckdb.DuckDBPyConnection, to_position: int, *, path: Path) -> int:
    """Write the table's events before a position to a file; return their count."""
    return _write(cursor.sql(named("events_before"), params={"to_position": to_position}), path)


def merge_events(cursor: duckdb.DuckDBPyConnection, files: Sequence[Path], *, path: Path) -> int:
    """Write the events of several files to one; return their count."""
    # The file without events has all columns; older files may lack some.
    params = {"files": [str(file) for file in (files[0].parent / NOTHING, *files)]}
    return _write(cursor.sql(named("events_of_files"), params=params), path)


def export_snapshot(cursor: duckdb.DuckDBPyConnection, path: Path) -> Snapshot:
    """Write the state tables to a file, in one transaction."""
    cursor.begin()
    try:
        ((position, at_ms, *_),) = cursor.sql(named("state_reached")).fetchall()
        rows = _write(cursor.sql(named("snapshot_rows"), params={"position": position}), path)
        return Snapshot(position, at_ms, rows)
    finally:
        cursor.rollback()


def kept(cursor: duckdb.DuckDBPyConnection) -> KeptHistory:
    """Return the registered files, oldest first, read in one transaction."""
    cursor.begin()
    try:
        return KeptHistory(
            cursor.sql(named("kept_history")).to_arrow_table(),
            cursor.sql(named("event_files")).to_arrow_table(),
        )
    finally:
        cursor.rollback()


def events_since(cursor: duckdb.DuckDBPyConnection, position: int) -> int:
    """Return the approximate number of events from a position on."""
    ((count,),) = cursor.sql(named("events_since"), params={"position": position}).fetchall()
    return int(count)


class Sweep:
    """Deletes unregistered history files once no query can still be reading them."""

    def __init__(self, home: Path, *, at_once: bool) -> None:
        """Prepare.

        Args:
            at_once: the first run deletes all unregistered files, as no query runs then. False: a
                query may be fetching a file.
        """
        self._home = home
        #: When each file was first seen unregistered; None until the first run.
        self._since: dict[Path, float] | None = None if at_once else {}

    def run(self, kept: KeptHistory) -> list[Path]:
        """Delete and return expired files; ``kept`` is registered, and no file is being written."""
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
    # Always close the reader: unread rows keep its transaction open.
    with reader, checked_parquet.writer(path, reader.schema, compression="zstd") as file:
        for batch in reader:
            file.write_batch(batch)
            rows += batch.num_rows
    return rows
