"""Creation of the tables and views of ``state.duckdb``, if missing or from another version."""

import hashlib
from functools import cache
from pathlib import Path
from typing import TypeAlias

import duckdb
import pyarrow as pa

from rmq_pipeline.errors import HomeFormatError
from rmq_pipeline.store import history
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.state_tables import STATE_TABLES
from rmq_pipeline.store.statements import named, quoted, tables, views

_Columns: TypeAlias = dict[str, list[tuple[str, str]]]


@cache
def made_by_this() -> str:
    """Return a digest of the definitions that this version creates.

    The digest includes DuckDB's version, because DuckDB stores views in a version-specific form.
    """
    kinds = " ".join(f"{kind.name}={int(kind)}" for kind in Kind)
    texts = [duckdb.__version__, kinds, tables(), views()]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def made_by(cursor: duckdb.DuckDBPyConnection) -> str:
    """Return the digest stored with the tables; empty if there are none, or older ones."""
    try:
        ((digest, *_),) = cursor.sql(named("made_by")).fetchall()
    except (duckdb.CatalogException, ValueError):
        return ""
    return str(digest)


def make(
    cursor: duckdb.DuckDBPyConnection, home: Path, *, made_by: str, files: history.FilesInUse
) -> None:
    """Create missing tables and columns and replace all views, inside an open transaction.

    Raises:
        HomeFormatError: a newer version made a table, with other columns.
    """
    kinds = pa.table(
        {
            "kind": pa.array([int(kind) for kind in Kind], pa.int16()),
            "name": [kind.name.lower() for kind in Kind],
        }
    )
    found = _columns(cursor)
    _rename(cursor, found)
    cursor.execute(tables())
    cursor.register("staged_kinds", kinds)
    if found:
        _add_columns(cursor)
    for name in ("begin_reached", "clear_kinds", "insert_kinds", "begin_snapshots"):
        cursor.execute(named(name))
    cursor.unregister("staged_kinds")
    # The log may register older files of the history again, at positions that are not dispatched.
    is_new = not cursor.sql(named("made_by")).fetchall()
    cursor.execute(named("begin_made_by"))
    if history.write_nothing(cursor, home, replace=True):
        cursor.execute(named("never_complete" if is_new else "set_columns_since"))
    files.update(cursor, may_fetch=False)
    cursor.execute(views())
    cursor.execute(named("set_made_by"), {"made_by": made_by})


def _rename(cursor: duckdb.DuckDBPyConnection, found: _Columns) -> None:
    """Give the tables and columns of an older version the names that they have now."""
    for table in STATE_TABLES:
        if table.formerly not in found:
            continue
        before = f"store.{quoted(table.formerly)}"
        names = [name for name, _ in found[table.formerly]]
        for column in table.columns:
            if column.formerly in names:
                into = {"column": quoted(column.formerly), "new_name": quoted(column.name)}
                cursor.execute(named("rename_column", table=before, **into))
        cursor.execute(named("rename_table", table=before, new_name=quoted(table.name)))


def _add_columns(cursor: duckdb.DuckDBPyConnection) -> None:
    """Append the declared columns that an older version's tables lack."""
    with duckdb.connect() as new:
        new.execute(tables())
        wanted = _columns(new)
    for table, found in _columns(cursor).items():
        columns = wanted.get(table, found)
        if columns[: len(found)] != found:
            raise HomeFormatError(
                f"The table {table} of the database has other columns, which this version of"
                f" rmq_pipeline does not know: {found}, not {columns}."
            )
        for column, of_type in columns[len(found) :]:
            names = {"table": f"store.{quoted(table)}", "column": quoted(column)}
            cursor.execute(named("add_column", **names, type=of_type))


def _columns(cursor: duckdb.DuckDBPyConnection) -> _Columns:
    """Return the names and types of the columns of each table."""
    found: _Columns = {}
    for table, column, of_type in cursor.sql(named("table_columns")).fetchall():
        found.setdefault(table, []).append((column, of_type))
    return found
