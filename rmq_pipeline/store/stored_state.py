"""What a broker starts from: the state tables as dispatch left them."""

from dataclasses import dataclass
from typing import Final

import duckdb
import pyarrow as pa

from rmq_pipeline.store.statements import named

_TABLES: Final = (
    "topics",
    "groups",
    "heads",
    "leases",
    "cursors",
    "behind",
    "scheduled",
    "windows",
    "segments",
    "event_segments",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """The state tables, all at log position ``dispatched``; columns as sql/state.sql says."""

    dispatched: int
    last_at_ms: int
    #: Larger than every id ever given, those of deleted topics and groups included.
    next_topic_id: int
    next_group_id: int
    topics: pa.Table
    groups: pa.Table
    heads: pa.Table
    #: delivery <= 0: waits to be delivered again, or to be dead-lettered.
    leases: pa.Table
    cursors: pa.Table
    behind: pa.Table
    scheduled: pa.Table
    windows: pa.Table
    segments: pa.Table
    event_segments: pa.Table


def load(cursor: duckdb.DuckDBPyConnection) -> StoredState:
    """Read it in one transaction."""
    cursor.begin()
    try:
        ((dispatched, last_at_ms, next_topic_id, next_group_id),) = cursor.sql(
            named("state_reached")
        ).fetchall()
        return StoredState(
            dispatched=dispatched,
            last_at_ms=last_at_ms,
            next_topic_id=next_topic_id,
            next_group_id=next_group_id,
            **{name: cursor.sql(named(f"state_{name}")).to_arrow_table() for name in _TABLES},
        )
    finally:
        cursor.rollback()
