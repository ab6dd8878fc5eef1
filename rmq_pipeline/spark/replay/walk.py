"""The walk of a replay: settled messages are handled again from a known state.

Messages are sorted by message group and in each group by order, and come in chunks of whole groups.
Each message has a role. Before the range it only updates the state. In the range its effects count.
Behind the range it only shows what else would change. A message that fails is retried at once. Its
last failure is final, and ``on_failure`` of the consumer group decides about its successors.

Each message group starts from the last state recorded before its first message of the range. The
messages between that state and the range are walked without effects. So are messages behind the
range, up to the next recorded state, which is compared with the replayed state.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.flight.client import Client
from rmq_pipeline.group import OnFailure
from rmq_pipeline.handling.group_walk import Rules, as_declared, group_starts, walk
from rmq_pipeline.handling.results import WalkResult
from rmq_pipeline.spark.replay.topic_log import Segment, stored_at

#: Roles of messages.
WARM_UP: Final = 0
RANGE: Final = 1
BEHIND: Final = 2
#: Additional column of the messages walked.
ROLE: Final = "role"

#: Messages of the range that are not acked. ``outcome``: dead_letter, parked, or held behind a
#: parked message.
FAILED: Final = pa.schema(
    [
        ("message_group", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("message_id", pa.string()),
        ("outcome", pa.string()),
        ("reason", pa.string()),
        ("error_type", pa.string()),
    ]
)

Mask = npt.NDArray[np.bool_]
#: Columns: the first and the last message of a message group.
FIRSTS_AND_LASTS: Final = pa.schema(
    [
        ("message_group", pa.string()),
        ("first_stored", pa.int64()),
        ("first_queue", pa.int32()),
        ("first", pa.int64()),
        ("last_stored", pa.int64()),
        ("last_queue", pa.int32()),
        ("last", pa.int64()),
    ]
)
_STORED_ORDER: Final = ["stored_at_ms", "queue_id", "queue_offset"]
#: Messages of a group to walk: those behind ``low``, up to ``high`` of its queue. For a group in
#: ``several`` queues: those behind ``low``, up to the last one in the range.
STRETCH: Final = pa.schema(
    [
        ("message_group", pa.string()),
        ("several", pa.bool_()),
        ("low_stored", pa.int64()),
        ("low_queue", pa.int32()),
        ("low", pa.int64()),
        ("high", pa.int64()),
        ("last_stored", pa.int64()),
        ("last_queue", pa.int32()),
        ("last", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class ReplayRules:
    """Rules of a replay for calls and failures."""

    rules: Rules
    on_failure: OnFailure = "dead_letter"
    #: Number of calls for a message before its failure is final.
    tries: int = 1

    def rules_of(self, role: int) -> Rules:
        """Return the rules for messages of a role: only publications of the range need ids."""
        if role == RANGE or not self.rules.publication:
            return self.rules
        return replace(self.rules, publication="")


@dataclass(slots=True)
class Replayed:
    """Results of a chunk."""

    #: Tables of the sink's schema, by role.
    rows: dict[int, list[pa.Table]] = field(default_factory=lambda: {RANGE: [], BEHIND: []})
    #: ``message_group`` and the state's columns of every group with state at the end.
    state: pa.Table | None = None
    #: FAILED, of messages in the range.
    failed: list[pa.Table] = field(default_factory=list)
    #: Number of messages by role.
    messages: dict[int, int] = field(default_factory=dict)
    #: topic -> number of messages that the range would publish.
    published: dict[str, int] = field(default_factory=dict)
    #: Those messages as schema.SEND, with their topics, if they must be sent.
    to_publish: list[tuple[str, pa.Table]] = field(default_factory=list)
    #: Message groups whose later messages are not handled.
    stopped: set[str] = field(default_factory=set)


class _Chunk:
    """Messages of whole groups, and which of them remain to be walked."""

    def __init__(self, messages: pa.Table) -> None:
        self.messages = messages.combine_chunks()
        n = messages.num_rows
        self.role = self.messages[ROLE].to_numpy()
        starts = group_starts(self.messages["message_group"])
        self.group = np.zeros(n, dtype=np.int64)
        self.group[starts] = 1
        self.group = np.cumsum(self.group) - 1
        begins = np.ones(n, dtype=bool)
        begins[1:] = (np.diff(self.role) != 0) | (np.diff(self.group) != 0)
        #: Number of each run of rows with the same group and role.
        self.stretch = np.cumsum(begins)
        self.left: Mask = np.ones(n, dtype=bool)
        self.tried = np.zeros(n, dtype=np.int32)

    def next_rows(self) -> npt.NDArray[np.int64]:
        """Return the rows of the next run of every group that has one left."""
        rows = np.flatnonzero(self.left)
        _, firsts = np.unique(self.group[rows], return_index=True)
        first_stretch = np.zeros(int(self.group[-1]) + 1, dtype=np.int64)
        first_stretch[self.group[rows[firsts]]] = self.stretch[rows[firsts]]
        chosen: npt.NDArray[np.int64] = rows[self.stretch[rows] == first_stretch[self.group[rows]]]
        return chosen

    def rest_of_groups(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the remaining rows of the message groups of these rows."""
        return np.flatnonzero(self.left & np.isin(self.group, self.group[rows]))


def walk_again(
    messages: pa.Table,
    state: pa.Table | None,
    *,
    replay_rules: ReplayRules,
    stopped: Collection[str] = (),
) -> Replayed:
    """Pass the messages of whole groups to the handler, each group from its state.

    Args:
        messages: handler.MESSAGES and ROLE; groups contiguous, each in order.
        state: ``message_group`` and the state's columns before the first message of each group.
        replay_rules: the handler, and the rules for failures.
        stopped: message groups that an earlier message has stopped.
    """
    chunk, done = _Chunk(messages), Replayed(state=state)
    if stopped:
        of_stopped = pc.is_in(chunk.messages["message_group"], pa.array(list(stopped)))
        _hold(chunk, np.flatnonzero(of_stopped.to_numpy()), done=done, replay_rules=replay_rules)
    for role in (WARM_UP, RANGE, BEHIND):
        done.messages[role] = int((chunk.role == role).sum())
    if not replay_rules.rules.ordered:
        _walk_unordered(chunk, done, replay_rules=replay_rules)
        return done
    while chunk.left.any():
        rows = chunk.next_rows()
        for role in np.unique(chunk.role[rows]).tolist():
            _walk_rows(
                chunk,
                rows[chunk.role[rows] == role],
                role=role,
                done=done,
                replay_rules=replay_rules,
            )
    return done


def _walk_rows(
    chunk: _Chunk,
    rows: npt.NDArray[np.int64],
    *,
    role: int,
    done: Replayed,
    replay_rules: ReplayRules,
) -> None:
    given = _rows_of(chunk, rows)
    walked = walk(given, done.state, rules=replay_rules.rules_of(role))
    done.state = _merged(done.state, walked.state)
    _keep(walked, role=role, done=done, replay_rules=replay_rules)
    outcomes = walked.exceptions["outcome"].to_numpy(zero_copy_only=False)
    at = walked.exceptions["row"].to_numpy()
    released, retried = rows[at[outcomes == "release"]], rows[at[outcomes == "retry"]]
    chunk.tried[retried] += 1
    again = retried[chunk.tried[retried] < replay_rules.tries]
    chunk.left[rows] = False
    chunk.left[released] = True
    chunk.left[again] = True
    final = (outcomes == "dead_letter") | ((outcomes == "retry") & ~np.isin(rows[at], again))
    if final.any():
        _fail_finally(
            chunk,
            rows=rows,
            failures=walked.exceptions.filter(pa.array(final)),
            role=role,
            done=done,
            replay_rules=replay_rules,
        )


def _fail_finally(
    chunk: _Chunk,
    *,
    rows: npt.NDArray[np.int64],
    failures: pa.Table,
    role: int,
    done: Replayed,
    replay_rules: ReplayRules,
) -> None:
    """Record final failures, and apply ``on_failure`` to their successors."""
    at = rows[failures["row"].to_numpy()]
    by_policy = failures["outcome"].to_numpy(zero_copy_only=False) == "retry"
    parks = replay_rules.on_failure == "park"
    names = np.where(by_policy & parks, "parked", "dead_letter")
    _note(chunk, at, done=done, role=role, outcome=names, failures=failures)
    stops = at[by_policy] if parks else at
    if replay_rules.on_failure == "dead_letter" or not len(stops):
        return
    _hold(chunk, chunk.rest_of_groups(stops), done=done, replay_rules=replay_rules)
    done.stopped.update(pc.drop_null(chunk.messages["message_group"].take(stops)).to_pylist())


def _hold(
    chunk: _Chunk, followers: npt.NDArray[np.int64], *, done: Replayed, replay_rules: ReplayRules
) -> None:
    """Mark the successors of a message that stops its group; the handler does not get them."""
    chunk.left[followers] = False
    in_range = followers[chunk.role[followers] == RANGE]
    held = np.full(len(in_range), "held" if replay_rules.on_failure == "park" else "dead_letter")
    _note(chunk, in_range, done=done, role=RANGE, outcome=held, failures=None)


def _note(
    chunk: _Chunk,
    at: npt.NDArray[np.int64],
    *,
    done: Replayed,
    role: int,
    outcome: npt.NDArray[np.str_],
    failures: pa.Table | None,
) -> None:
    if role != RANGE or not len(at):
        return
    place = chunk.messages.select(FAILED.names[:4]).take(pa.array(at))
    why = [pa.nulls(len(at), pa.string())] * 2
    if failures is not None:
        why = [failures["reason"], failures["error_type"]]
    columns = [*place.columns, pa.array(outcome.tolist(), pa.string()), *why]
    done.failed.append(pa.table(columns, schema=FAILED))


def _keep(walked: WalkResult, *, role: int, done: Replayed, replay_rules: ReplayRules) -> None:
    if role == WARM_UP:
        return
    if walked.rows is not None:
        done.rows[role].append(walked.rows)
    if role == RANGE:
        for topic, table in walked.publish.items():
            done.published[topic] = done.published.get(topic, 0) + table.num_rows
        if replay_rules.rules.publication:
            done.to_publish += walked.publish.items()


def _walk_unordered(chunk: _Chunk, done: Replayed, *, replay_rules: ReplayRules) -> None:
    """Walk messages without order: a failure does not affect other messages."""
    while chunk.left.any():
        rows = np.flatnonzero(chunk.left)
        walked = walk(_rows_of(chunk, rows), None, rules=replay_rules.rules)
        _keep(walked, role=RANGE, done=done, replay_rules=replay_rules)
        chunk.left[:] = False
        outcomes = walked.exceptions["outcome"].to_numpy(zero_copy_only=False)
        at = rows[walked.exceptions["row"].to_numpy()]
        retried = at[outcomes == "retry"]
        chunk.tried[retried] += 1
        again = retried[chunk.tried[retried] < replay_rules.tries]
        chunk.left[again] = True
        final = ~np.isin(at, again)
        if final.any():
            parks = (outcomes[final] == "retry") & (replay_rules.on_failure == "park")
            names = np.where(parks, "parked", "dead_letter")
            failures = walked.exceptions.filter(pa.array(final))
            _note(chunk, at[final], done=done, role=RANGE, outcome=names, failures=failures)


def _rows_of(chunk: _Chunk, rows: npt.NDArray[np.int64]) -> pa.Table:
    messages = chunk.messages.drop_columns([ROLE])
    return messages if len(rows) == messages.num_rows else messages.take(pa.array(rows))


def _merged(state: pa.Table | None, changed: pa.Table | None) -> pa.Table | None:
    """Return the state, with changed groups updated."""
    if changed is None:
        return state
    kept = changed.filter(pc.invert(changed["removed"])).drop_columns(["removed"])
    if state is None or not state.num_rows:
        return kept
    others = pc.invert(pc.is_in(state["message_group"], changed["message_group"].combine_chunks()))
    return pa.concat_tables([state.filter(others), kept.select(state.column_names)])


def firsts_and_lasts(messages: pa.Table) -> pa.Table:
    """Return PLACES of messages in stored order; messages without a message group are ignored."""
    messages = messages.filter(pc.is_valid(messages["message_group"]))
    wanted = [(name, end) for end in ("first", "last") for name in _STORED_ORDER]
    found = messages.group_by("message_group", use_threads=False).aggregate(wanted)
    names = [f"{name}_{end}" for name, end in wanted]
    return (
        found.select(["message_group", *names])
        .rename_columns(FIRSTS_AND_LASTS.names)
        .cast(FIRSTS_AND_LASTS)
    )


def merge_firsts_and_lasts(tables: list[pa.Table]) -> pa.Table:
    """Merge PLACES of several parts, which may have groups in common."""
    found = pa.concat_tables([FIRSTS_AND_LASTS.empty_table(), *tables])
    ends = [
        found.select(["message_group", *names]).rename_columns(["message_group", *_STORED_ORDER])
        for names in (FIRSTS_AND_LASTS.names[1:4], FIRSTS_AND_LASTS.names[4:])
    ]
    return firsts_and_lasts(
        pa.concat_tables(ends).sort_by([(n, "ascending") for n in _STORED_ORDER])
    )


@dataclass(frozen=True, slots=True)
class BoundaryState:
    """Recorded states and stretches of the message groups in a range."""

    #: STRETCH.
    stretches: pa.Table
    #: ``message_group`` and the state's columns.
    before: pa.Table
    after: pa.Table
    #: Message groups without a state recorded before the range.
    new: pa.Array

    def unknown(self, kept: Mapping[int, int]) -> int:
        """Return the number of message groups whose earlier messages may have expired.

        Args:
            kept: queue_id -> the first offset that the topic retains.
        """
        mine = self.stretches.filter(pc.is_in(self.stretches["message_group"], self.new))
        return sum(bool(kept.get(queue, 0)) for queue in mine["low_queue"].to_pylist())

    def reads(self, segment: Segment) -> bool:
        """Return True if a segment may contain messages to walk."""
        if pc.any(self.stretches["several"]).as_py():
            return True
        mine = self.stretches.filter(pc.equal(self.stretches["low_queue"], segment.queue_id))
        if not mine.num_rows:
            return False
        low, high = pc.min(mine["low"]).as_py(), pc.max(mine["high"]).as_py()
        return bool(segment.end > low + 1 and segment.base <= high)


def find_boundary_state(
    client: Client, places: pa.Table, *, group: str, topic: str, state: pa.Schema
) -> BoundaryState:
    """Find the states before and after the messages of a range.

    Args:
        client: client of the broker.
        places: FIRSTS_AND_LASTS of the settled messages in the range.
        group: the consumer group.
        topic: topic of the messages.
        state: the consumer's columns.
    """
    history = client.keyed_state_history(
        group,
        topic,
        places=pa.table(
            {
                "message_group": places["message_group"],
                "queue_id": places["first_queue"],
                "queue_offset": places["first"],
                "stored_at_ms": places["first_stored"],
                "last_queue_id": places["last_queue"],
                "last_queue_offset": places["last"],
            }
        ),
    )
    moments = {
        name: history.filter(pc.equal(history["moment"], name))
        for name in ("before", "after", "begins")
    }
    return BoundaryState(
        stretches=_stretches(client, places, moments=moments, topic=topic),
        before=_states(moments["before"], state),
        after=_states(moments["after"], state),
        new=pc.unique(moments["begins"]["message_group"]),
    )


def _stretches(
    client: Client, places: pa.Table, *, moments: dict[str, pa.Table], topic: str
) -> pa.Table:
    by_group: dict[str, dict[str, dict[str, Any]]] = {}
    for name, table in moments.items():
        facts = table.select(["message_group", "queue_id", "queue_offset"]).to_pylist()
        for row in facts:
            by_group.setdefault(row["message_group"], {})[name] = row
    rows = [
        _stretch(place, by_group.get(place["message_group"], {})) for place in places.to_pylist()
    ]
    moved = [row for row in rows if row["several"] and row["low"] >= 0]
    found = stored_at(client, topic, places=[(row["low_queue"], row["low"]) for row in moved])
    for row, stored_ms in zip(moved, found, strict=True):
        row["low_stored"] = -1 if stored_ms is None else stored_ms
    return pa.Table.from_pylist(rows, schema=STRETCH)


def _stretch(place: dict[str, Any], moments: dict[str, dict[str, Any]]) -> dict[str, Any]:
    queue = place["last_queue"]
    before, after = moments.get("before"), moments.get("after")
    begins = moments.get("begins") or {"queue_id": queue, "queue_offset": place["first"]}
    start = before or begins
    low = start["queue_offset"] if before else start["queue_offset"] - 1
    several = place["first_queue"] != queue or start["queue_id"] != queue
    high = place["last"]
    if after is not None and after["queue_id"] == queue:
        high = max(high, after["queue_offset"])
    return {
        "message_group": place["message_group"],
        "several": several,
        "low_stored": -1,
        "low_queue": queue if start["queue_id"] is None else start["queue_id"],
        "low": low if before or not several else -1,
        "high": high,
        "last_stored": place["last_stored"],
        "last_queue": queue,
        "last": place["last"],
    }


def _states(rows: pa.Table, state: pa.Schema) -> pa.Table:
    """Return the states that were not removed, in the consumer's columns."""
    return as_declared(rows.filter(pc.invert(rows["removed"])), state)
