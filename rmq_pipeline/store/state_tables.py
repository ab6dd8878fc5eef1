"""The state tables, each declared once.

`make sql` writes ``store/sql/tables/<name>.sql`` from a declaration: the table, what dispatch does
with its events, what recovery reads, its rows in a snapshot, and its rows as of a moment. Dispatch
(fold.py) and the model that tests compare with read the declarations themselves.

A table with ``sets`` is regular: the last event of a key is its row. The other tables are folded by
hand, in sql/dispatch.sql, sql/history.sql and sql/history_files.sql.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from rmq_pipeline.store.events import CONSUMPTION, REMOVES_ROW, Kind


class Column(NamedTuple):
    """A column that is not part of the key."""

    name: str
    #: Its type in DuckDB.
    type: str
    #: SQL over the columns of an event that gives its value; default: the column of that name.
    source: str = ""
    #: The column of a snapshot that has its value; default: the source.
    snapshot: str = ""
    #: False: recovery does not need it.
    is_loaded: bool = True
    #: True: an event in which it is null keeps the value of the row.
    is_kept: bool = False
    #: Its name in older homes, if that was another.
    formerly: str = ""

    @property
    def of_event(self) -> str:
        """SQL over the columns of an event that gives its value."""
        return self.source or quoted(self.name)

    @property
    def of_snapshot(self) -> str:
        """The column of a snapshot that has its value."""
        return self.snapshot or self.of_event


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTable:
    """A table of ``state.duckdb`` that recovery reads."""

    name: str
    #: Its name in older homes, if that was another.
    formerly: str = ""
    #: What a row is, for the reader of the SQL.
    row: str
    #: Further sentences about the columns.
    notes: str = ""
    #: Column names and types that identify a row.
    key: tuple[tuple[str, str], ...]
    columns: tuple[Column, ...] = ()
    #: Kinds after which the row is as the event says.
    sets: frozenset[Kind] = frozenset()
    #: Kinds after which there is no row.
    removes: frozenset[Kind] = frozenset()
    #: True: RESET deletes the rows of its queue.
    is_reset: bool = False
    #: SQL over the columns of the table: a row for which it is false is not kept.
    condition: str = ""
    #: What writes a row, and what deletes it, where the table is folded by hand.
    written_by: str = ""
    goes: str = ""
    #: Value of ``what`` in snapshots; empty: the rows are not in snapshots.
    in_snapshots: str = ""
    #: Columns of a snapshot that all rows have the same: (name, value).
    snapshot_constants: tuple[tuple[str, int], ...] = ()
    #: Columns that recovery sorts by; default: the key.
    order: tuple[str, ...] = ()

    @property
    def is_regular(self) -> bool:
        """True if the last event of a key is its row."""
        return bool(self.sets)

    @property
    def kinds(self) -> frozenset[Kind]:
        """Kinds of events that change a regular table."""
        return self.sets | self.removes

    @property
    def key_names(self) -> tuple[str, ...]:
        """Names of the columns that identify a row."""
        return tuple(name for name, _ in self.key)

    @property
    def kept_columns(self) -> tuple[Column, ...]:
        """Columns whose value an event may leave as it was."""
        return tuple(column for column in self.columns if column.is_kept)

    @property
    def folding(self) -> tuple[str, ...]:
        """Names of the statements that apply the events of a transaction, in order."""
        kept = (f"fold_{self.name}_{column.name}" for column in self.kept_columns)
        return (f"fold_{self.name}", *kept, f"delete_{self.name}", f"insert_{self.name}")

    def belongs_to(self, column: str) -> bool:
        """Return True if rows have this column: topic_id or group_id, and go with what it names."""
        return column in (*self.key_names, *(each.name for each in self.columns))


def quoted(name: str) -> str:
    """Return a column name for SQL; some of them are reserved words."""
    return f'"{name}"' if name in ("row", "rows", "end", "partition") else name


_QUEUE: Final = (("group_id", "INTEGER"), ("topic_id", "INTEGER"), ("queue_id", "INTEGER"))
_OFFSET: Final = ("queue_offset", "BIGINT")

TOPICS: Final = StateTable(
    name="topics",
    row="a topic that exists; detail is its JSON.",
    key=(("topic_id", "INTEGER"),),
    columns=(
        Column("name", "VARCHAR", "detail ->> '$.name'", is_loaded=False),
        Column("detail", "VARCHAR"),
    ),
    sets=frozenset({Kind.TOPIC}),
)

GROUPS: Final = StateTable(
    name="groups",
    row="a consumer group that exists; detail is its JSON.",
    key=(("group_id", "INTEGER"),),
    columns=(
        Column("name", "VARCHAR", "detail ->> '$.name'", is_loaded=False),
        Column("detail", "VARCHAR"),
    ),
    sets=frozenset({Kind.GROUP}),
)

HEADS: Final = StateTable(
    name="heads",
    row="a message queue that was written to: offsets [min_offset, max_offset) exist.",
    key=(("topic_id", "INTEGER"), ("queue_id", "INTEGER")),
    columns=(
        Column("min_offset", "BIGINT"),
        Column("max_offset", "BIGINT", snapshot="queue_offset"),
    ),
    written_by="every message; EXPIRED raises min_offset.",
    goes="with TOPIC_DELETED.",
    in_snapshots="head",
)

LEASES: Final = StateTable(
    name="leases",
    row="a message that was delivered, or that will be dead-lettered, and is not settled.",
    notes=(
        "delivery > 0 is the number in its receipt; Delivery in store/events.py names the others. "
        "epoch: as in events. failure: JSON of its last one."
    ),
    key=(*_QUEUE, _OFFSET),
    columns=(
        Column("attempt", "INTEGER"),
        Column("visible_at_ms", "BIGINT"),
        Column("delivery", "BIGINT"),
        Column("epoch", "BIGINT"),
        Column("message_group_hash", "BIGINT"),
        Column("client_id", "VARCHAR"),
        Column("failure", "VARCHAR", "detail", is_kept=True),
        Column(
            "parked_at_ms",
            "BIGINT",
            "CASE kind WHEN $PARK THEN at_ms END",
            snapshot="at_ms",
            is_loaded=False,
        ),
    ),
    sets=frozenset(map(Kind, CONSUMPTION)) - REMOVES_ROW,
    removes=REMOVES_ROW,
    is_reset=True,
    in_snapshots="lease",
)

CURSORS: Final = StateTable(
    name="cursors",
    row="the group has examined all messages of the queue before queue_offset.",
    key=_QUEUE,
    columns=(Column(*_OFFSET),),
    written_by="LEASE, CURSOR and OFFSET_UPDATED raise it, RESET sets it.",
    goes="with TOPIC_DELETED, GROUP_DELETED.",
    in_snapshots="cursor",
)

BEHIND: Final = StateTable(
    name="behind",
    row="a message group with waiting messages before the cursor, from queue_offset on.",
    key=(*_QUEUE, ("message_group_hash", "BIGINT")),
    columns=(Column(*_OFFSET),),
    sets=frozenset({Kind.BEHIND}),
    removes=frozenset({Kind.CAUGHT_UP}),
    is_reset=True,
    in_snapshots="behind",
    order=("group_id", "topic_id", "queue_id", "queue_offset"),
)

QUARANTINED_GROUPS: Final = StateTable(
    name="quarantined_groups",
    formerly="condemned",
    row="a message group that a consumer group quarantined from queue_offset on; failure says why.",
    key=(*_QUEUE, ("message_group_hash", "BIGINT")),
    columns=(
        Column(*_OFFSET),
        Column("quarantined_at_ms", "BIGINT", "at_ms", is_loaded=False, formerly="condemned_at_ms"),
        Column("failure", "VARCHAR", "detail"),
    ),
    sets=frozenset({Kind.QUARANTINE}),
    removes=frozenset({Kind.LIFT}),
    is_reset=True,
    in_snapshots="quarantined_group",
    order=("group_id", "topic_id", "queue_id", "queue_offset"),
)

SCHEDULED: Final = StateTable(
    name="scheduled",
    row="a message of SCHEDULE_TOPIC_XXXX (offset there) that waits for its time.",
    key=(("queue_id", "INTEGER"), _OFFSET),
    columns=(
        Column("deliver_at_ms", "BIGINT", snapshot="visible_at_ms"),
        Column("target_topic_id", "INTEGER"),
        Column("position", "BIGINT", snapshot="-"),
        Column("row", "INTEGER", snapshot="-"),
    ),
    written_by="every message of that topic.",
    goes="with SCHEDULE_DELIVERED, SCHEDULE_DROPPED, SCHEDULE_RECALLED.",
    in_snapshots="scheduled",
    snapshot_constants=(("topic_id", 1),),
)

HALVES: Final = StateTable(
    name="halves",
    row="an open half message (offset in the half topic), and its next check.",
    key=(_OFFSET,),
    columns=(
        Column("position", "BIGINT", snapshot="-"),
        Column("row", "INTEGER", snapshot="-"),
        Column("target_topic_id", "INTEGER"),
        Column("message_id_hash", "BIGINT", "message_group_hash"),
        Column("producer_group", "VARCHAR", "client_id"),
        Column("checks", "INTEGER", "attempt"),
        Column("next_check_ms", "BIGINT", "visible_at_ms"),
        Column("immunity_ms", "BIGINT", "delivery"),
    ),
    written_by="HALF; the first one of a half message comes in the frame of the message.",
    goes="with HALF_COMMITTED, HALF_ROLLED_BACK, HALF_GIVEN_UP.",
    in_snapshots="half",
    snapshot_constants=(("topic_id", 2), ("queue_id", 0)),
)

WINDOWS: Final = StateTable(
    name="windows",
    row="the lease under which one run does one kind of work, and its last settle.",
    key=(("name", "VARCHAR"),),
    columns=(
        Column("owner", "VARCHAR"),
        Column("epoch", "BIGINT"),
        Column("expires_at_ms", "BIGINT"),
        Column("settle_id", "VARCHAR"),
        Column("settle_answer", "VARCHAR"),
    ),
    written_by="WINDOW, WINDOW_CLOSED (expires at 0), SETTLED.",
    goes="never: an epoch is not given twice.",
)

LITE_SUBSCRIPTIONS: Final = StateTable(
    name="lite_subscriptions",
    row="the lite topics that a client of a group has subscribed to, a JSON list of names.",
    key=(("group_id", "INTEGER"), ("topic_id", "INTEGER"), ("client_id", "VARCHAR")),
    columns=(Column("lite_topics", "VARCHAR", "detail"),),
    sets=frozenset({Kind.LITE_SUBSCRIPTION}),
    condition="lite_topics <> '[]'",
)

QUEUE_LOCKS: Final = StateTable(
    name="queue_locks",
    row="the client of a group that alone receives from a queue, until expires_at_ms.",
    notes="A lock that has expired stays until another client takes it.",
    key=_QUEUE,
    columns=(
        Column("client_id", "VARCHAR"),
        Column("expires_at_ms", "BIGINT", "visible_at_ms"),
        Column("locked_at_ms", "BIGINT", "store.locked_at_ms(kind, epoch)"),
        Column("renewed_at_ms", "BIGINT", "at_ms"),
    ),
    sets=frozenset({Kind.QUEUE_LOCKED}),
    removes=frozenset({Kind.QUEUE_UNLOCKED}),
)

RESETS: Final = StateTable(
    name="resets",
    row="how often somebody has reset a group in a queue.",
    key=_QUEUE,
    columns=(Column("resets", "BIGINT"),),
    written_by="RESET, unless the reader itself moved back.",
    goes="with TOPIC_DELETED, GROUP_DELETED.",
)

SEGMENTS: Final = StateTable(
    name="segments",
    row="a registered Parquet segment of a message queue.",
    key=(("topic_id", "INTEGER"), ("queue_id", "INTEGER"), ("base", "BIGINT")),
    columns=(
        Column("end", "BIGINT"),
        Column("path", "VARCHAR"),
        Column("rows", "BIGINT", is_loaded=False),
        Column("bytes", "BIGINT", is_loaded=False),
    ),
    written_by="SEGMENT, SEGMENTS_REPLACED.",
    goes="with SEGMENTS_REPLACED, EXPIRED, TOPIC_DELETED.",
)

EVENT_SEGMENTS: Final = StateTable(
    name="event_segments",
    row="a registered Parquet file of events.",
    key=(("path", "VARCHAR"),),
    columns=(
        Column("from_position", "BIGINT"),
        Column("to_position", "BIGINT"),
        Column("rows", "BIGINT"),
    ),
    written_by="EVENT_SEGMENT, EVENT_SEGMENTS_REPLACED.",
    goes="with an EVENT_SEGMENTS_REPLACED that removes it.",
    order=("from_position",),
)

STATE_TABLES: Final = (
    TOPICS,
    GROUPS,
    HEADS,
    LEASES,
    CURSORS,
    BEHIND,
    QUARANTINED_GROUPS,
    SCHEDULED,
    HALVES,
    WINDOWS,
    LITE_SUBSCRIPTIONS,
    QUEUE_LOCKS,
    RESETS,
    SEGMENTS,
    EVENT_SEGMENTS,
)
