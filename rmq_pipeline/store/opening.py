"""The tables and views of ``state.duckdb``, made when they are not there or of another version."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa

from rmq_pipeline.store import history
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.statements import named, script

_SCRIPTS: Final = ("schema", "views", "history")


@cache
def made_by_this() -> str:
    """What this version makes, as a digest; DuckDB keeps views in a form of its own version."""
    kinds = " ".join(f"{kind.name}={int(kind)}" for kind in Kind)
    texts = [duckdb.__version__, kinds, *(script(name) for name in _SCRIPTS)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def make(cursor: duckdb.DuckDBPyConnection, home: Path, *, made_by: str) -> None:
    """Make tables that are missing, and views as this version has them, in an open transaction."""
    kinds = pa.table(
        {
            "kind": pa.array([int(kind) for kind in Kind], pa.int16()),
            "name": [kind.name.lower() for kind in Kind],
        }
    )
    cursor.execute(script("schema"))
    cursor.register("staged_kinds", kinds)
    for name in ("begin_reached", "clear_kinds", "insert_kinds", "begin_snapshots"):
        cursor.execute(named(name))
    cursor.unregister("staged_kinds")
    history.write_nothing(cursor, home)
    history.use_files(cursor, home)
    cursor.execute(script("views"))
    cursor.execute(script("history"))
    cursor.execute(named("clear_made_by"))
    cursor.execute(named("insert_made_by"), {"made_by": made_by})
