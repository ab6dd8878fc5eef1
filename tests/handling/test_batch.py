"""Micro-batches: whole message groups, in order, in parts of about the same size."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rmq_pipeline import schema
from rmq_pipeline.handling.batch import Batch, cut
from rmq_pipeline.handling.results import EXCEPTION


def received(rows: list[tuple[int, int, str | None]]) -> pa.Table:
    """Messages of (queue_id, queue_offset, message_group)."""
    columns = {
        "queue_id": [r[0] for r in rows],
        "queue_offset": [r[1] for r in rows],
        "message_group": [r[2] for r in rows],
        "receipt_handle": [f"{r[0]}/{r[1]}" for r in rows],
    }
    arrays = [pa.array(columns.get(f.name, [None] * len(rows)), f.type) for f in schema.RECEIVED]
    return pa.table(arrays, schema=schema.RECEIVED)


def places(table: pa.Table) -> list[tuple[int, int]]:
    return list(zip(table["queue_id"].to_pylist(), table["queue_offset"].to_pylist(), strict=True))


def parts(batch: Batch) -> list[pa.Table]:
    return [
        batch.received.slice(start, stop - start)
        for start, stop in zip(batch.bounds[:-1], batch.bounds[1:], strict=True)
    ]


GROUPS = st.sampled_from([None, "a", "b", "c", "d"])


@given(
    st.lists(GROUPS, min_size=1, max_size=60), st.integers(1, 3), st.integers(1, 4), st.randoms()
)
def test_groups_stay_whole_and_in_order(
    groups: list[str | None], batches: int, count: int, random: object
) -> None:
    rows = [(ord(group) % 3 if group else 0, i, group) for i, group in enumerate(groups)]
    random.shuffle(rows)  # type: ignore[attr-defined]

    made = cut(received(rows), number=5, batches=batches, parts=count, ordered=True)

    assert [b.number for b in made] == list(range(5, 5 + len(made)))
    assert len(made) <= batches
    assert all(1 <= b.parts <= count and b.bounds[0] == 0 for b in made)
    assert sorted(p for b in made for p in places(b.received)) == sorted(r[:2] for r in rows)
    home: dict[str, tuple[int, int]] = {}
    for batch in made:
        for number, part in enumerate(parts(batch)):
            assert part.num_rows
            names = part["message_group"].to_pylist()
            for group in set(names) - {None}:
                assert home.setdefault(group, (batch.number, number)) == (batch.number, number)
                first = names.index(group)
                assert names[first : first + names.count(group)] == [group] * names.count(group)
                mine = part.filter(pa.compute.equal(part["message_group"], group))
                assert places(mine) == sorted(places(mine))


def test_unordered_messages_are_cut_evenly() -> None:
    rows: list[tuple[int, int, str | None]] = [(0, i, "same") for i in range(10)]

    (batch,) = cut(received(rows), number=0, batches=1, parts=2, ordered=False)

    assert batch.bounds == [0, 5, 10]


def test_outcomes_ack_all_but_the_exceptions_and_leave_out_the_released() -> None:
    rows: list[tuple[int, int, str | None]] = [(0, i, f"g{i // 3}") for i in range(6)]
    (batch,) = cut(received(rows), number=0, batches=1, parts=2, ordered=True)
    said = pa.Table.from_pylist(
        [
            {"row": 0, "outcome": "dead_letter", "reason": "no"},
            {
                "row": 1,
                "outcome": "retry",
                "retry_after_ms": 5,
                "reason": "later",
                "error_type": "E",
                "traceback": "where",
            },
            {"row": 2, "outcome": "release"},
        ],
        schema=EXCEPTION,
    )

    outcomes = batch.outcomes({0: EXCEPTION.empty_table(), 1: said}, run_id="run")

    assert outcomes.schema == schema.OUTCOME
    assert [tuple(row.values()) for row in outcomes.to_pylist()] == [
        ("0/0", "ack", None, None, None, "run", None, None),
        ("0/1", "ack", None, None, None, "run", None, None),
        ("0/2", "ack", None, None, None, "run", None, None),
        ("0/3", "dead_letter", None, "no", None, "run", None, None),
        ("0/4", "retry", 5, "later", "E", "run", None, "where"),
    ]


def test_each_message_group_is_asked_for_once() -> None:
    rows = [(0, 0, "a"), (0, 1, None), (0, 2, "a"), (0, 3, "b")]
    (batch,) = cut(received(rows), number=0, batches=1, parts=1, ordered=True)

    assert sorted(batch.message_groups()["message_group"].to_pylist()) == ["a", "b"]


@given(st.lists(GROUPS, min_size=1, max_size=60), st.integers(1, 6), st.randoms())
def test_state_goes_to_the_part_that_has_its_group(
    groups: list[str | None], count: int, random: object
) -> None:
    rows = [(0, i, group) for i, group in enumerate(groups)]
    (batch,) = cut(received(rows), number=0, batches=1, parts=count, ordered=True)
    names = sorted({group for group in groups if group is not None and group != "d"})
    random.shuffle(names)  # type: ignore[attr-defined]
    state = pa.table({"message_group": pa.array(names, pa.string()), "seen": range(len(names))})

    given_parts = batch.given(state)

    assert [messages.num_rows for messages, _ in given_parts] == [
        part.num_rows for part in parts(batch)
    ]
    found: dict[str, int] = {}
    for messages, known in given_parts:
        assert known is not None
        mine = dict(zip(known["message_group"].to_pylist(), known["seen"].to_pylist(), strict=True))
        assert set(mine) == set(messages["message_group"].to_pylist()) - {None, "d"}
        found |= mine
    assert found == {name: i for i, name in enumerate(names)}


def test_without_state_a_part_has_its_messages_only() -> None:
    (batch,) = cut(received([(0, 0, "a")]), number=0, batches=1, parts=1, ordered=True)

    ((messages, state),) = batch.given(None)

    assert (messages.num_rows, state) == (1, None)
    assert "receipt_handle" not in messages.column_names
