"""Fold of one dispatch transaction: applies the net effect of its rows to the tables.

Messages are applied first, then events. For each message of a consumer group, window or topic only
the last event counts. State that begins and ends inside the transaction therefore costs almost
nothing. Only RESET splits the events into runs: earlier events lose their effect, later ones keep
it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import duckdb
import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.store import staging
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.keyed_state import KeyedState
from rmq_pipeline.store.log.stretch import Rows
from rmq_pipeline.store.redrives import RedriveFold
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


class Fold:
    """Applies sections inside the open transaction of its connection."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self._keyed = KeyedState(connection)
        self._redrives = RedriveFold(connection)
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
            events = staging.events(by_kind[_EVENTS])
            kinds = staging.kinds_of(events)
            reached["at_ms"] = staging.largest(events, "at_ms")
            reached["topic_id"] = staging.largest(events, "topic_id")
            reached["group_id"] = staging.largest(events, "group_id")
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
        for group_id, topic_id, rows in staging.state_runs(by_kind[_KEYED_STATE]):
            self._keyed.fold(rows, group_id=group_id, topic_id=topic_id)
        if {Kind.TOPIC_DELETED, Kind.GROUP_DELETED} & kinds:
            self._forget_deleted(kinds)
        self._run("set_reached", reached)
        self._unregister()

    def _take_messages(self, found: Sequence[Rows]) -> int:
        """Fill the consume queue; return stored_at_ms of the last message."""
        rows, origins = staging.messages(found)
        self._connection.register("staged_messages", rows)
        self._run("insert_messages")
        self._run("raise_heads")
        if staging.holds(rows, "topic_id", value=SCHEDULE_TOPIC_ID):
            self._run("insert_scheduled", {"schedule_topic_id": SCHEDULE_TOPIC_ID})
        letters = staging.dead_letters(origins, self._topics_of_dead_letters())
        if letters.num_rows:
            self._connection.register("staged_dead_letters", letters)
            self._run("insert_dead_letters")
        return staging.largest(rows, "stored_at_ms")

    def _take_events(self, events: pa.Table, kinds: frozenset[int], *, has_messages: bool) -> None:
        self._run("insert_events")
        if Kind.RESET in kinds:
            for run in staging.runs_between_resets(events):
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
            newest_ms = staging.largest(staging.of_kinds(events, _HALVES), "at_ms")
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
        kinds = staging.kinds_of(events)
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
