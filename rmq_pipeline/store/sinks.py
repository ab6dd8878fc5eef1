"""Reads of a group's sink from the state tables."""

from dataclasses import dataclass

import duckdb
import pyarrow as pa

from rmq_pipeline.store.statements import named


@dataclass(frozen=True, slots=True)
class SinkTables:
    """A group's sink, read in one transaction."""

    version: int
    #: The version of the last replacement.
    replaced: int
    #: Current files, with the columns of sql/sinks.sql; replaced files, as far as history is
    #: retained.
    files: pa.Table
    removed: pa.Table
    #: Version, added paths and removed paths of the given replacement; None if it is unknown.
    answer: tuple[int, list[str], list[str]] | None


def load(cursor: duckdb.DuckDBPyConnection, group_id: int, *, replacement_id: str) -> SinkTables:
    """Read the sink in one transaction."""
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
    """Return the version of a group's sink, and its current or its replaced files."""
    of_group = {"group_id": group_id}
    cursor.begin()
    try:
        ((version, _),) = cursor.sql(named("sink_version"), params=of_group).fetchall()
        name = "removed_sink_files" if removed else "sink_files"
        return version, cursor.sql(named(name), params=of_group).to_arrow_table()
    finally:
        cursor.rollback()
