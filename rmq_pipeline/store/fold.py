"""Fold of one dispatch transaction: applies the net effect of its rows to the tables.

The rows of the log are staged as Arrow tables, without bodies, and DuckDB's statements read those.
Messages are applied first, then events. For each message of a consumer group, window or topic only
the last event counts. State that begins and ends inside the transaction therefore costs almost
nothing. Only RESET splits the events into runs: earlier events lose their effect, later ones keep
it.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits, schema
from rmq_pipeline.message import hash64
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.keyed_state import KeyedState
from rmq_pipeline.store.log.stretch import Rows
from rmq_pipeline.store.state_tables import GROUPS, STATE_TABLES, TOPICS, StateTable
from rmq_pipeline.store.statements import named
from rmq_pipeline.topic import DLQ_PREFIX, HALF_TOPIC_ID, SCHEDULE_TOPIC_ID

_MESSAGES: Final = 1
_EVENTS: Final = 2
_KEYED_STATE: Final = 3

#: Regular tables, whose events are applied before the messages, for each run of events between two
#: resets, and at the end.
_NAMES: Final = (TOPICS, GROUPS)
_PER_RUN: Final = tuple(each for each in STATE_TABLES if each.is_regular and each.is_reset)
_AT_END: Final = tuple(
    each for each in STATE_TABLES if each.is_regular and each not in (*_NAMES, *_PER_RUN)
)
_CURSOR_KINDS: Final = frozenset({Kind.LEASE, Kind.CURSOR, Kind.OFFSET_UPDATED})
#: Statements to run, in this order, if one of their kinds is among the events.
_OTHER_STATEMENTS: Final = (
    ({Kind.WINDOW, Kind.WINDOW_CLOSED}, ("set_windows",)),
    ({Kind.SETTLED}, ("set_settled",)),
    ({Kind.RESET}, ("count_resets",)),
    ({Kind.SINK_FILE}, ("insert_sink_files",)),
    (
        {Kind.SINK_REPLACED},
        ("insert_replacing_files", "remove_sink_files", "insert_sink_replacements"),
    ),
    ({Kind.SEGMENT}, ("insert_segments",)),
    ({Kind.SEGMENTS_REPLACED}, ("remove_replaced_segments", "insert_replacing_segments")),
    (
        {Kind.EXPIRED},
        (
            "keep_expired_heads",
            "expire_segments",
            "expire_messages",
            "expire_dead_letters",
            "expire_redrives",
            "raise_min_offset",
        ),
    ),
    ({Kind.EVENT_SEGMENT}, ("insert_event_segments",)),
    (
        {Kind.EVENT_SEGMENTS_REPLACED},
        ("remove_event_segments", "insert_replacing_event_segments"),
    ),
    (
        {Kind.SNAPSHOT},
        (
            *("insert_snapshots", "forget_snapshots"),
            *("forget_deleted_messages", "forget_deleted_names", "forget_expired_heads"),
        ),
    ),
)
_HALVES: Final = frozenset(range(Kind.HALF, Kind.HALF_GIVEN_UP + 1))
#: Tables whose rows go with their topic or group.
_OF_TOPICS: Final = (
    *(each.name for each in STATE_TABLES if each.belongs_to("topic_id")),
    *("dead_letters", "keyed_tables"),
)
_OF_GROUPS: Final = (
    *(each.name for each in STATE_TABLES if each.belongs_to("group_id")),
    *("sink_files", "sink_replacements", "effects", "keyed_tables"),
)
_MESSAGE_COLUMNS: Final = [
    name for name in schema.MESSAGE.names if name not in ("body", "properties")
]
_DEAD_LETTER_COLUMNS: Final = ["topic_id", "queue_id", "queue_offset", "properties", "stored_at_ms"]
#: Batches with fewer rows on average are combined, because DuckDB has a fixed cost per batch.
_SMALL_ROWS: Final = 1024
#: Events that may change the outcome of a redrive; the first lease does not.
_OUTCOMES: Final = frozenset(
    {
        Kind.LEASE,
        Kind.ACK,
        Kind.RETRY,
        Kind.EXPIRE,
        Kind.DEAD_LETTER,
        Kind.PARK,
        Kind.RESET,
        Kind.TOPIC_DELETED,
        Kind.GROUP_DELETED,
    }
)
#: Old effects are deleted at most once per interval of the log's time.
_FORGET_EVERY_MS: Final = 60_000


class Fold:
    """Applies sections inside the open transaction of its connection."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self._keyed = KeyedState(connection)
        self._redrives = _RedriveFold(connection)
        self._dead_letter_topics: pa.Array | None = None

    def forget(self) -> None:
        """Discard what was cached during a transaction that was rolled back.

        Runs no query: the memory for its result may be missing.
        """
        self._dead_letter_topics = None
        self._redrives.forget()
        self._keyed.forget()

    def apply(self, found: Iterable[Rows], end: int) -> None:
        """Apply rows in log order; the tables then reflect log position ``end``."""
        by_kind: dict[int, list[Rows]] = {_MESSAGES: [], _EVENTS: [], _KEYED_STATE: []}
        for rows in found:
            if rows.batch.num_rows:
                by_kind[rows.kind].append(rows)
        reached = {"dispatched": end, "at_ms": 0, "topic_id": 0, "group_id": 0}
        kinds: frozenset[int] = frozenset()
        events = None
        if by_kind[_EVENTS]:
            events = staged_events(by_kind[_EVENTS])
            kinds = _kinds_of(events)
            reached["at_ms"] = _largest(events, "at_ms")
            reached["topic_id"] = _largest(events, "topic_id")
            reached["group_id"] = _largest(events, "group_id")
            self._connection.register("staged_events", events)
            self._fold(kinds, _NAMES)
        if Kind.TOPIC in kinds:
            self._dead_letter_topics = None
        if by_kind[_MESSAGES]:
            stored_at_ms = self._take_messages(by_kind[_MESSAGES])
            reached["at_ms"] = max(reached["at_ms"], stored_at_ms)
        if events is not None:
            self._take_events(events, kinds, has_messages=bool(by_kind[_MESSAGES]))
            self._redrives.take(kinds, reached["at_ms"])
            if Kind.SINK_REPLACED in kinds:
                before_ms = reached["at_ms"] - limits.SINK_HISTORY_MS
                self._run("forget_sink_files", {"before_ms": before_ms})
        for group_id, topic_id, rows in staged_state(by_kind[_KEYED_STATE]):
            self._keyed.fold(rows, group_id=group_id, topic_id=topic_id)
        if {Kind.TOPIC_DELETED, Kind.GROUP_DELETED} & kinds:
            self._forget_deleted(kinds)
        self._run("set_reached", reached)
        self._unregister()

    def _take_messages(self, found: Sequence[Rows]) -> int:
        """Fill the consume queue; return stored_at_ms of the last message."""
        rows, origins = staged_messages(found)
        self._connection.register("staged_messages", rows)
        self._run("insert_messages")
        self._run("raise_heads")
        if _holds(rows, "topic_id", value=SCHEDULE_TOPIC_ID):
            self._run("insert_scheduled", {"schedule_topic_id": SCHEDULE_TOPIC_ID})
        letters = _dead_letters(origins, self._topics_of_dead_letters())
        if letters.num_rows:
            self._connection.register("staged_dead_letters", letters)
            self._run("insert_dead_letters")
        return _largest(rows, "stored_at_ms")

    def _take_events(self, events: pa.Table, kinds: frozenset[int], *, has_messages: bool) -> None:
        self._run("insert_events")
        if Kind.RESET in kinds:
            for run in _runs_between_resets(events):
                self._take_run(run)
            self._connection.register("staged_events", events)
        else:
            self._take_queues(kinds)
        if {Kind.SCHEDULE_DELIVERED, Kind.SCHEDULE_DROPPED, Kind.SCHEDULE_RECALLED} & kinds:
            self._run("delete_scheduled", {"schedule_topic_id": SCHEDULE_TOPIC_ID})
        if Kind.SCHEDULE_RECALLED in kinds:
            self._run("disown_recalled", {"schedule_topic_id": SCHEDULE_TOPIC_ID})
        if _HALVES & kinds:
            self._take_halves(new=has_messages)
            # The events' own times are used, so the split of the log into transactions does not
            # matter.
            newest_ms = _largest(_of_kinds(events, _HALVES), "at_ms")
            before_ms = newest_ms - limits.TRANSACTION_REMEMBERED_MS
            self._run("forget_ended_halves", {"before_ms": before_ms})
        self._fold(kinds, _AT_END)
        self._run_for(kinds, _OTHER_STATEMENTS)

    def _take_halves(self, *, new: bool) -> None:
        """Apply events of half messages; ``new``: the transaction may contain half messages."""
        self._run("fold_halves")
        self._run("set_halves")
        if new:
            self._run("insert_halves", {"half_topic_id": HALF_TOPIC_ID})
        self._run("delete_halves")
        self._run("insert_ended_halves")

    def _take_run(self, events: pa.Table) -> None:
        self._connection.register("staged_events", events)
        kinds = _kinds_of(events)
        if Kind.RESET in kinds:
            for table in _PER_RUN:
                self._run(f"reset_{table.name}")
            self._run("reset_cursors")
        else:
            self._take_queues(kinds)

    def _take_queues(self, kinds: frozenset[int]) -> None:
        self._fold(kinds, _PER_RUN)
        if not kinds.isdisjoint(_CURSOR_KINDS):
            self._run("raise_cursors")

    def _forget_deleted(self, kinds: frozenset[int]) -> None:
        self._keyed.drop_deleted()
        if Kind.TOPIC_DELETED in kinds:
            self._run("note_deleted_topics")
            for table in _OF_TOPICS:
                self._connection.execute(named("forget_topics", table=f"store.{table}"))
        if Kind.GROUP_DELETED in kinds:
            self._run("note_deleted_groups")
            for table in _OF_GROUPS:
                self._connection.execute(named("forget_groups", table=f"store.{table}"))

    def _topics_of_dead_letters(self) -> pa.Array:
        if self._dead_letter_topics is None:
            found = self._connection.sql(
                named("dead_letter_topics"), params={"prefix": DLQ_PREFIX}
            ).fetchall()
            self._dead_letter_topics = pa.array([topic_id for (topic_id,) in found], pa.int32())
        return self._dead_letter_topics

    def _fold(self, kinds: frozenset[int], tables: Sequence[StateTable]) -> None:
        """Apply the events to regular tables."""
        for table in tables:
            if not kinds.isdisjoint(table.kinds):
                for name in table.folding:
                    self._run(name)

    def _run_for(
        self,
        kinds: frozenset[int],
        statements: Sequence[tuple[frozenset[int] | set[Kind], tuple[str, ...]]],
    ) -> None:
        for wanted, names in statements:
            if not kinds.isdisjoint(wanted):
                for name in names:
                    self._run(name)

    def _run(self, name: str, params: Mapping[str, int] | None = None) -> None:
        self._connection.execute(named(name), params)

    def _unregister(self) -> None:
        for name in ("staged_messages", "staged_events", "staged_dead_letters"):
            self._connection.unregister(name)


class _RedriveFold:
    """Applies the events of a dispatch transaction to store.redrives and store.effects."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        #: True if a redrive has no final outcome yet; None: unknown.
        self._open: bool | None = None
        self._forgotten_at_ms = 0

    def forget(self) -> None:
        """Discard what was cached during a transaction that was rolled back."""
        self._open = None

    def take(self, kinds: frozenset[int], at_ms: int) -> None:
        """Apply staged_events; ``kinds`` are its kinds, ``at_ms`` the time of its last event."""
        if Kind.REDRIVEN in kinds:
            self._run("insert_redrives")
            self._open = True
        if _OUTCOMES & kinds and self._has_open():
            self._run("fold_redrives")
            self._run("set_redrive_outcomes")
            self._open = None
        if Kind.EFFECT in kinds:
            self._run("insert_effects")
            if at_ms - self._forgotten_at_ms >= _FORGET_EVERY_MS:
                window = limits.IDEMPOTENCY_WINDOW_MS
                self._run("forget_effects", {"at_ms": at_ms, "usual_ms": window})
                self._forgotten_at_ms = at_ms

    def _has_open(self) -> bool:
        if self._open is None:
            ((count,),) = self._connection.sql(named("count_open_redrives")).fetchall()
            self._open = count > 0
        return self._open

    def _run(self, name: str, params: dict[str, int] | None = None) -> None:
        self._connection.execute(named(name), params)


def staged_messages(found: Sequence[Rows]) -> tuple[pa.Table, pa.Table]:
    """Return the columns of the consume queue, and those that give the origin of dead letters."""
    table = pa.Table.from_batches([rows.batch for rows in found])
    kept = _placed(_compact(table.select(_MESSAGE_COLUMNS)), found)
    tag_hash = pa.array(hash64(_one_array(kept.column("tag"))))
    return kept.append_column("tag_hash", tag_hash), table.select(_DEAD_LETTER_COLUMNS)


def _dead_letters(table: pa.Table, topic_ids: pa.Array) -> pa.Table:
    """Return the rows of dead letter topics."""
    return table.filter(pc.is_in(table.column("topic_id"), value_set=topic_ids))


def staged_events(found: Sequence[Rows]) -> pa.Table:
    """Return the events with their log positions and ``seq``, their order."""
    table = pa.Table.from_batches([rows.batch for rows in found])
    placed = _placed(_compact(table), found)
    return placed.append_column("seq", pa.array(np.arange(placed.num_rows)))


def _kinds_of(table: pa.Table) -> frozenset[int]:
    """Return the event kinds that occur."""
    return frozenset(pc.unique(table.column("kind")).to_pylist())


def _runs_between_resets(table: pa.Table) -> list[pa.Table]:
    """Split the events, in order, into runs that contain only RESET or no RESET."""
    is_reset = _one_array(pc.equal(table.column("kind"), int(Kind.RESET))).to_numpy(
        zero_copy_only=False
    )
    cuts = np.flatnonzero(np.diff(is_reset)) + 1
    bounds = [0, *cuts.tolist(), table.num_rows]
    return [table.slice(start, stop - start) for start, stop in itertools.pairwise(bounds)]


def staged_state(found: Sequence[Rows]) -> list[tuple[int, int, pa.Table]]:
    """Return keyed state as (group_id, topic_id, rows in order), with one schema per run."""
    runs: dict[tuple[int, int], list[list[pa.RecordBatch]]] = {}
    for _, batch, *_ in found:
        metadata = batch.schema.metadata
        key = (int(metadata[b"group_id"]), int(metadata[b"topic_id"]))
        of_key = runs.setdefault(key, [])
        if of_key and of_key[-1][0].schema.equals(batch.schema):
            of_key[-1].append(batch)
        else:
            of_key.append([batch])
    return [
        (group_id, topic_id, _ordered(pa.Table.from_batches(run)))
        for (group_id, topic_id), of_key in runs.items()
        for run in of_key
    ]


def _holds(table: pa.Table, column: str, *, value: int) -> bool:
    """Return True if a column contains a value."""
    return bool(pc.any(pc.equal(table.column(column), value)).as_py())


def _of_kinds(events: pa.Table, kinds: frozenset[int]) -> pa.Table:
    """Return the events of these kinds."""
    return events.filter(pc.is_in(events.column("kind"), pa.array(sorted(kinds), pa.int16())))


def _largest(table: pa.Table, column: str) -> int:
    """Return the largest value of a column; 0 if there is none."""
    return int(pc.max(table.column(column)).as_py() or 0)


def _ordered(table: pa.Table) -> pa.Table:
    return table.append_column("staged_order", pa.array(np.arange(table.num_rows)))


def _compact(table: pa.Table) -> pa.Table:
    chunks = table.column(0).num_chunks
    return table.combine_chunks() if table.num_rows < chunks * _SMALL_ROWS else table


def _placed(table: pa.Table, found: Sequence[Rows]) -> pa.Table:
    """Append the position of each row's section, and the row's number there."""
    counts = np.array([count for rows in found for count in rows.counts])
    positions = np.array([position for rows in found for position in rows.positions])
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    rows = (np.arange(len(starts)) - starts).astype(np.int32)
    placed = table.append_column("position", pa.array(np.repeat(positions, counts)))
    return placed.append_column("row", pa.array(rows))


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
