"""Initial state of a broker: the state tables as dispatch left them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import duckdb
import pyarrow as pa

from rmq_pipeline.store.state_tables import STATE_TABLES
from rmq_pipeline.store.statements import named
from rmq_pipeline.topic import SCHEDULE_TOPIC_ID, Topic

_TABLES: Final = (*(table.name for table in STATE_TABLES), "redriven", "sinks")


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
    segments: pa.Table
    event_segments: pa.Table
    #: For each topic that suppresses repetitions: messages stored within the window, oldest first.
    recent: Mapping[int, pa.Table]


def load(cursor: duckdb.DuckDBPyConnection) -> StoredState:
    """Read the state tables in one transaction."""
    cursor.begin()
    try:
        ((dispatched, last_at_ms, next_topic_id, next_group_id),) = cursor.sql(
            named("state_reached")
        ).fetchall()
        tables = {name: cursor.sql(named(f"state_{name}")).to_arrow_table() for name in _TABLES}
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
