"""Reads of the state tables: nearly all of them when a broker starts, later those of one request.

The registered segments are read when they are first needed. The state of a group's sink, the
origins of dead letters and the effects of messages stay in the tables, because few requests need
them. Verification reads every table of a closed home.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import duckdb
import numpy as np
import pyarrow as pa

from rmq_pipeline.message import Int32s, Int64s
from rmq_pipeline.store.state_tables import STATE_TABLES
from rmq_pipeline.store.statements import named, quoted
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID, Topic

_SEGMENTS: Final = ("segments", "event_segments")
_TABLES: Final = (
    *(table.name for table in STATE_TABLES if table.name not in _SEGMENTS),
    "redriven",
    "sinks",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """The state tables, all at log position ``dispatched``; columns as in state_tables.py."""

    dispatched: int
    last_at_ms: int
    #: Larger than every id ever assigned, including those of deleted topics and groups.
    next_topic_id: int
    next_group_id: int
    topics: pa.Table
    groups: pa.Table
    heads: pa.Table
    #: delivery <= 0: waits for redelivery or for the dead letter topic, or is parked.
    leases: pa.Table
    cursors: pa.Table
    behind: pa.Table
    quarantined_groups: pa.Table
    scheduled: pa.Table
    #: Unresolved half messages.
    halves: pa.Table
    #: Dead letters after a redrive.
    redriven: pa.Table
    windows: pa.Table
    lite_subscriptions: pa.Table
    queue_locks: pa.Table
    #: Number of resets of each group on each queue.
    resets: pa.Table
    #: group_id, version, replaced.
    sinks: pa.Table
    #: For each topic that suppresses repetitions: messages stored within the window, oldest first.
    recent: Mapping[int, pa.Table]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSegments:
    """The registered segments of messages and of events; columns as in state_tables.py."""

    segments: pa.Table
    event_segments: pa.Table


def load(cursor: duckdb.DuckDBPyConnection) -> StoredState:
    """Read the state tables in one transaction."""
    cursor.begin()
    try:
        ((dispatched, last_at_ms, next_topic_id, next_group_id),) = cursor.sql(
            named("state_reached")
        ).fetchall()
        tables = _tables(cursor, _TABLES)
        return StoredState(
            dispatched=dispatched,
            last_at_ms=last_at_ms,
            next_topic_id=next_topic_id,
            next_group_id=next_group_id,
            recent=_recent(cursor, tables["topics"], now_ms=last_at_ms),
            **tables,
        )
    finally:
        cursor.rollback()


def load_segments(cursor: duckdb.DuckDBPyConnection) -> StoredSegments:
    """Read the registered segments in one transaction."""
    cursor.begin()
    try:
        return StoredSegments(**_tables(cursor, _SEGMENTS))
    finally:
        cursor.rollback()


def _tables(cursor: duckdb.DuckDBPyConnection, names: Iterable[str]) -> dict[str, pa.Table]:
    return {name: cursor.sql(named(f"state_{name}")).to_arrow_table() for name in names}


def _recent(
    cursor: duckdb.DuckDBPyConnection, topics: pa.Table, *, now_ms: int
) -> dict[int, pa.Table]:
    found = {}
    for topic in map(Topic.from_json, topics.column("detail").to_pylist()):
        if topic.deduplicate != "none":
            params = {
                "topic_id": topic.topic_id,
                "schedule_topic_id": SCHEDULE_TOPIC_ID,
                "since_ms": max(
                    topic.deduplicate_since_ms, now_ms - topic.deduplicate_window_ms + 1
                ),
            }
            rows = cursor.sql(named("state_recent"), params=params)
            found[topic.topic_id] = rows.to_arrow_table()
    return found


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


def sink(cursor: duckdb.DuckDBPyConnection, group_id: int, *, replacement_id: str) -> SinkTables:
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


def sink_files(
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


def dead_letter_origins(
    cursor: duckdb.DuckDBPyConnection, *, topic_id: int, queue_id: Int32s, queue_offset: Int64s
) -> pa.Table:
    """Return the origins of dead letters; see Database.dead_letter_origins."""
    asked = {
        "queue_id": queue_id,
        "queue_offset": queue_offset,
        "ordinal": np.arange(len(queue_id)),
    }
    cursor.register("asked_places", pa.table(asked))
    params = {"topic_id": topic_id}
    return cursor.sql(named("dead_letter_origins"), params=params).to_arrow_table()


def effects_seen(
    cursor: duckdb.DuckDBPyConnection, *, group_id: int, keys: pa.Array, after_ms: int
) -> pa.Array:
    """Return when each key last had an effect after ``after_ms``; null if never."""
    numbered = {"idempotency_key": keys, "ordinal": np.arange(len(keys))}
    cursor.register("asked_keys", pa.table(numbered))
    params = {"group_id": group_id, "after_ms": after_ms}
    found = cursor.sql(named("effects_seen"), params=params).to_arrow_table()
    when = np.full(len(keys), -1, dtype=np.int64)
    when[found.column("ordinal").to_numpy()] = found.column("seen_at_ms").to_numpy()
    return pa.array(when, mask=when < 0)


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """Position and registered files of a readable database."""

    #: Log position that its tables reflect.
    dispatched: int
    #: Paths of registered segments, event files and snapshots, relative to the home.
    files: frozenset[str]


def read_database(path: Path) -> DatabaseFacts:
    """Read every value of every table; DuckDB checks the checksums of its blocks.

    Raises:
        ValueError: the database cannot be read; the error says why.
    """
    try:
        with duckdb.connect(path, read_only=True) as connection:
            for schema, table in connection.sql(named("tables_to_verify")).fetchall():
                name = f"{quoted(schema)}.{quoted(table)}"
                connection.sql(named("read_whole_table", table=name)).fetchall()
            ((dispatched, *_),) = connection.sql(named("state_reached")).fetchall()
            files = connection.sql(named("registered_files")).fetchall()
    except duckdb.Error as error:
        raise ValueError(str(error).partition("\n")[0]) from error
    return DatabaseFacts(dispatched, frozenset(file for (file,) in files))


@dataclass(frozen=True, slots=True)
class Ends:
    """What a readable database says about where things end."""

    #: All earlier frames are in the files.
    sealed_to: int
    next_topic_id: int
    #: max_offset of each queue, by (topic_id, queue_id).
    heads: Mapping[tuple[int, int], int]
    #: Names of the topics, by id.
    topics: Mapping[int, str]


def read_ends(path: Path) -> Ends:
    """Read where the queues and the sealed log of a database end.

    Raises:
        ValueError: the database cannot be read; the error says why.
    """
    try:
        with duckdb.connect(path, read_only=True) as connection:
            ((sealed_to,),) = connection.sql(named("sealed_position")).fetchall()
            ((_, _, next_topic_id, _),) = connection.sql(named("state_reached")).fetchall()
            heads = connection.sql(named("state_heads")).fetchall()
            topics = connection.sql(named("state_topics")).fetchall()
    except duckdb.Error as error:
        raise ValueError(str(error).partition("\n")[0]) from error
    return Ends(
        sealed_to,
        next_topic_id,
        {(topic_id, queue_id): end for topic_id, queue_id, _, end in heads},
        {topic_id: Topic.from_json(detail).name for topic_id, detail in topics},
    )


@dataclass(frozen=True, slots=True)
class CopyFacts:
    """A copied database: its log position, the time of its last frame, and the files it names."""

    dispatched: int
    last_at_ms: int
    #: All earlier frames are in the files.
    sealed_to: int
    files: frozenset[str]


def finish_copy(path: Path) -> CopyFacts:
    """Write the write-ahead log of a copied database into its file, and return what it says.

    Raises:
        ValueError: the database cannot be read; the error says why.
    """
    try:
        with duckdb.connect(path, config={"threads": 1}) as connection:
            connection.checkpoint()
            ((dispatched, at_ms, *_),) = connection.sql(named("state_reached")).fetchall()
            ((sealed_to,),) = connection.sql(named("sealed_position")).fetchall()
            files = connection.sql(named("registered_files")).fetchall()
    except duckdb.Error as error:
        raise ValueError(str(error).partition("\n")[0]) from error
    return CopyFacts(dispatched, at_ms, sealed_to, frozenset(file for (file,) in files))


def forget_sinks(path: Path) -> None:
    """Remove all records of sinks from a database that no broker has open."""
    with duckdb.connect(path, config={"threads": 1}) as connection:
        for statement in ("forget_all_sink_files", "forget_all_sink_replacements"):
            connection.execute(named(statement))
