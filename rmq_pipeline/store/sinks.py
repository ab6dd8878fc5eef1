"""What the tables say of a group's sink."""

from dataclasses import dataclass

import duckdb
import pyarrow as pa

from rmq_pipeline.store.statements import named


@dataclass(frozen=True, slots=True)
class SinkTables:
    """A group's sink, all of it of one moment."""

    version: int
    #: The version of the last replacement.
    replaced: int
    #: What counts, as sql/sinks.sql says; and what did, as far as the history goes.
    files: pa.Table
    removed: pa.Table
    #: Version, paths added and removed of the replacement asked for; None when there was none.
    answer: tuple[int, list[str], list[str]] | None


def load(cursor: duckdb.DuckDBPyConnection, group_id: int, *, replacement_id: str) -> SinkTables:
    """Read it in one transaction."""
    of_group = {"group_id": group_id}
    cursor.begin()
    try:
        ((version, replaced),) = cursor.sql(named("sink_version"), params=of_group).fetchall()
        files = cursor.sql(named("sink_files"), params=of_group).to_arrow_table()
        removed = cursor.sql(named("removed_sink_files"), params=of_group).to_arrow_table()
        asked = {**of_group, "replacement_id": replacement_id}
        before = cursor.sql(named("sink_replacement"), params=asked).fetchall()
        return SinkTables(version, replaced, files, removed, before[0] if before else None)
    finally:
        cursor.rollback()


def listed(
    cursor: duckdb.DuckDBPyConnection, group_id: int, *, removed: bool
) -> tuple[int, pa.Table]:
    """The version of a group's sink, and what counts with it, or what was replaced."""
    of_group = {"group_id": group_id}
    cursor.begin()
    try:
        ((version, _),) = cursor.sql(named("sink_version"), params=of_group).fetchall()
        name = "removed_sink_files" if removed else "sink_files"
        return version, cursor.sql(named(name), params=of_group).to_arrow_table()
    finally:
        cursor.rollback()
