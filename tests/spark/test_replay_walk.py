"""The walk of a replay: roles, failures that are final, and groups longer than a chunk."""

from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_pipeline.group import OnFailure
from rmq_pipeline.handling.group_walk import Rules
from rmq_pipeline.handling.handler import MESSAGES, RESULT, Outcome
from rmq_pipeline.spark.replay.reading import chunks
from rmq_pipeline.spark.replay.walk import (
    BEHIND,
    RANGE,
    ROLE,
    WARM_UP,
    Replayed,
    ReplayRules,
    walk_again,
)

SINK = pa.schema([("message_group", pa.string()), ("body", pa.string()), ("step", pa.int64())])
STATE = pa.schema([("steps", pa.int64())])
CALLS: list[int] = []


def messages(*rows: tuple[str | None, str, int]) -> pa.Table:
    """Messages of (message_group, body, role), sorted, at offsets 0, 1, 2, … of queue 0."""
    columns: dict[str, list[Any]] = {
        "queue_id": [0] * len(rows),
        "queue_offset": list(range(len(rows))),
        "message_id": [f"m{i}" for i in range(len(rows))],
        "message_group": [group for group, _, _ in rows],
        "body": [body.encode() for _, body, _ in rows],
        "delivery_attempt": [1] * len(rows),
    }
    arrays = [pa.array(columns.get(f.name, [None] * len(rows)), f.type) for f in MESSAGES]
    made = pa.table(arrays, schema=MESSAGES)
    return made.append_column(ROLE, pa.array([role for _, _, role in rows], pa.int32()))


def steps(given_messages: pa.Table, state: pa.Table) -> Outcome:
    """Counts a group's messages; ``bad`` raises, ``rejected`` is a dead letter with its row."""
    CALLS.append(given_messages.num_rows)
    n = state["steps"][0].as_py() if state.num_rows else 0
    bodies = [body.decode() for body in given_messages["body"].to_pylist()]
    if "bad" in bodies:
        raise ValueError("a bad body")
    rows = [
        {"message_group": group, "body": body, "step": n + i}
        for i, (group, body) in enumerate(
            zip(given_messages["message_group"].to_pylist(), bodies, strict=True), start=1
        )
    ]
    rejected = [
        {"queue_id": 0, "queue_offset": offset, "outcome": "dead_letter", "reason": "no hope"}
        for offset, body in zip(given_messages["queue_offset"].to_pylist(), bodies, strict=True)
        if body == "rejected"
    ]
    types = pa.schema([*list(RESULT)[:3], ("reason", pa.string())])
    return Outcome(
        rows=pa.Table.from_pylist(rows, schema=SINK),
        state=pa.table({"steps": [n + len(bodies)]}, schema=STATE) if state is not None else None,
        results=pa.Table.from_pylist(rejected, schema=types) if rejected else None,
    )


def rules_of(on_failure: OnFailure = "dead_letter", *, tries: int = 1, **rules: Any) -> ReplayRules:
    given_rules = {"sink_schema": SINK, "state_schema": STATE, **rules}
    return ReplayRules(Rules(steps, **given_rules), on_failure=on_failure, tries=tries)


def rows(done: Replayed, role: int = RANGE) -> list[tuple[str, str, int]]:
    return [tuple(row.values()) for table in done.rows[role] for row in table.to_pylist()]


def failed(done: Replayed) -> list[tuple[int, str]]:
    return sorted(
        (row["queue_offset"], row["outcome"]) for t in done.failed for row in t.to_pylist()
    )


def state(done: Replayed) -> dict[str, int]:
    assert done.state is not None
    return {row["message_group"]: row["steps"] for row in done.state.to_pylist()}


def known(**groups: int) -> pa.Table:
    return pa.table({"message_group": list(groups), "steps": pa.array(groups.values(), pa.int64())})


def test_only_the_range_has_effects_and_all_roles_move_the_state() -> None:
    given_messages = messages(
        ("a", "1", WARM_UP),
        ("a", "2", RANGE),
        ("a", "3", WARM_UP),
        ("a", "4", RANGE),
        ("a", "5", BEHIND),
        ("b", "1", RANGE),
    )

    done = walk_again(given_messages, known(a=10), replay_rules=rules_of())

    assert sorted(rows(done)) == [("a", "2", 12), ("a", "4", 14), ("b", "1", 1)]
    assert rows(done, BEHIND) == [("a", "5", 15)]
    assert state(done) == {"a": 15, "b": 1}
    assert done.messages == {WARM_UP: 2, RANGE: 3, BEHIND: 1}


def test_a_state_without_nulls_may_be_removed() -> None:
    never_null = pa.schema([pa.field("steps", pa.int64(), nullable=False)])

    def removing(given_messages: pa.Table, _: pa.Table) -> Outcome:
        if given_messages["body"][0].as_py() == b"gone":
            return Outcome(state=never_null.empty_table())
        return Outcome(state=pa.table({"steps": [given_messages.num_rows]}, schema=never_null))

    given_messages = messages(("a", "1", WARM_UP), ("a", "gone", RANGE), ("b", "2", WARM_UP))
    done = walk_again(
        given_messages, None, replay_rules=ReplayRules(Rules(removing, state_schema=never_null))
    )

    assert state(done) == {"b": 1}


@pytest.mark.parametrize(
    ("on_failure", "outcomes", "bodies"),
    [
        ("dead_letter", [(1, "dead_letter")], ["1", "3", "4"]),
        ("park", [(1, "parked"), (2, "held"), (3, "held")], ["1"]),
        ("dead_letter_group", [(i, "dead_letter") for i in (1, 2, 3)], ["1"]),
    ],
)
def test_what_follows_a_final_failure_goes_by_the_groups_policy(
    on_failure: OnFailure, outcomes: list[tuple[int, str]], bodies: list[str]
) -> None:
    given_messages = messages(
        ("a", "1", RANGE), ("a", "bad", RANGE), ("a", "3", RANGE), ("a", "4", RANGE)
    )

    done = walk_again(given_messages, None, replay_rules=rules_of(on_failure))

    assert failed(done) == outcomes
    assert [body for _, body, _ in rows(done)] == bodies
    assert state(done) == {"a": len(bodies)}


def test_a_group_that_was_parked_is_held_in_the_next_chunk_too() -> None:
    first = walk_again(messages(("a", "bad", RANGE)), None, replay_rules=rules_of("park"))
    following = messages(("a", "2", RANGE), ("b", "1", RANGE))

    done = walk_again(following, None, replay_rules=rules_of("park"), stopped=first.stopped)

    assert first.stopped == {"a"}
    assert failed(done) == [(0, "held")]
    assert rows(done) == [("b", "1", 1)]


def test_a_failure_is_final_after_so_many_tries() -> None:
    CALLS.clear()

    done = walk_again(messages(("a", "bad", RANGE)), None, replay_rules=rules_of(tries=3))

    assert CALLS == [1, 1, 1]
    assert failed(done) == [(0, "dead_letter")]


def test_a_rejected_message_is_no_reason_to_park() -> None:
    given_messages = messages(("a", "rejected", RANGE), ("a", "2", RANGE))

    done = walk_again(given_messages, None, replay_rules=rules_of("park"))

    assert failed(done) == [(0, "dead_letter")]
    assert [body for _, body, _ in rows(done)] == ["rejected", "2"]


def test_failures_of_other_roles_are_not_told() -> None:
    given_messages = messages(("a", "bad", WARM_UP), ("a", "2", RANGE), ("a", "bad", BEHIND))

    done = walk_again(given_messages, None, replay_rules=rules_of())

    assert failed(done) == []
    assert rows(done) == [("a", "2", 1)]


def test_without_order_a_failure_stops_no_other_message() -> None:
    given_messages = messages(("a", "1", RANGE), ("a", "bad", RANGE), (None, "3", RANGE))
    unordered = rules_of("park", ordered=False, state_schema=None)

    def stateless(given_rows: pa.Table, _: pa.Table) -> Outcome:
        return Outcome(rows=steps(given_rows, STATE.empty_table()).rows)

    rules = Rules(stateless, ordered=False, sink_schema=SINK)
    done = walk_again(given_messages, None, replay_rules=ReplayRules(rules, on_failure="park"))

    assert unordered.on_failure == "park"
    assert failed(done) == [(1, "parked")]
    assert [body for _, body, _ in rows(done)] == ["1", "3"]


@pytest.mark.parametrize(("tries", "calls"), [(1, [3, 1, 1, 1]), (2, [3, 1, 1, 1, 1])])
def test_without_order_nothing_of_a_retried_message_counts(tries: int, calls: list[int]) -> None:
    given_messages = messages(("a", "1", RANGE), ("a", "later", RANGE), (None, "3", RANGE))
    made: list[int] = []

    def handler(some: pa.Table, _: pa.Table) -> Outcome:
        made.append(some.num_rows)
        late = some.filter(pc.equal(some["body"], b"later")).select(["queue_id", "queue_offset"])
        return Outcome(
            rows=steps(some, STATE.empty_table()).rows,
            results=late.append_column("outcome", pa.array(["retry"] * late.num_rows)),
        )

    rules = Rules(handler, ordered=False, sink_schema=SINK)
    done = walk_again(given_messages, None, replay_rules=ReplayRules(rules, tries=tries))

    assert made == calls
    assert failed(done) == [(1, "dead_letter")]
    assert [body for _, body, _ in rows(done)] == ["1", "3"]


def cut(table: pa.Table, rows_each: int) -> list[pa.Table]:
    return [table.slice(at, rows_each) for at in range(0, table.num_rows, rows_each)]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    chunk=st.integers(1, 12),
    batch=st.integers(1, 7),
)
def test_chunks_are_whole_groups_but_for_long_ones(
    sizes: list[int], chunk: int, batch: int
) -> None:
    table = messages(*((f"g{i}", "x", RANGE) for i, size in enumerate(sizes) for _ in range(size)))

    found = list(chunks(cut(table, batch), rows=chunk))

    assert pa.concat_tables([t for t, _ in found]).equals(table)
    for (one, goes_on), (following, _) in pairwise(found):
        split = one["message_group"][-1].equals(following["message_group"][0])
        # Only a table of one group is cut, and then it says that it may go on.
        assert goes_on or not split
        assert not split or len(set(one["message_group"].to_pylist())) == 1
