"""Recorded state in the columns that a consumer declares today."""

from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.window import run_window
from rmq_pipeline.handling.group_walk import as_declared
from rmq_pipeline.handling.handler import Handler, Outcome
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.settings import Settings

N = pa.schema([("n", pa.int64())])
NEVER_NULL = pa.schema([pa.field("n", pa.int64(), nullable=False)])
NUMBERS, SMALL = pa.map_(pa.string(), pa.int64()), pa.map_(pa.string(), pa.int8())
N_AND_LAST = pa.schema([("n", pa.int64()), ("last", pa.string())])


@pytest.mark.parametrize(
    ("recorded", "declared", "found"),
    [
        (pa.array([1, 2]), pa.int64(), [1, 2]),
        (pa.array([1, 2], pa.int32()), pa.string(), ["1", "2"]),
        (pa.array(["1", "many"]), pa.int64(), [1, None]),
        (pa.array([1, 1_000]), pa.int8(), [1, None]),
        (pa.array([[1], [2]]), pa.int64(), [None, None]),
        (pa.array([None, "2"]), pa.int64(), [None, 2]),
        (pa.array(["1", "2"]), pa.list_(pa.string()), [None, None]),
        (pa.array([1, 2]), pa.list_(pa.int64()), [None, None]),
        (pa.array([[1], [1_000]]), pa.list_(pa.int8()), [[1], None]),
        (pa.array([[1], [1, 2]]), pa.list_(pa.int64(), 2), [None, [1, 2]]),
        (pa.array([[("a", 1)], [("b", 1_000)]], NUMBERS), SMALL, [[("a", 1)], None]),
        (pa.array([{"a": 1}, {"a": 1_000}]), pa.struct([("a", pa.int8())]), [{"a": 1}, None]),
        (pa.array(["1", "x"], pa.string_view()), pa.int64(), [1, None]),
    ],
)
def test_what_cannot_be_cast_is_null(
    recorded: pa.Array, declared: pa.DataType, found: list[Any]
) -> None:
    known = pa.table({"message_group": ["a", "b"], "x": recorded})

    made = as_declared(known, pa.schema([("x", declared)]))

    assert made.schema == pa.schema([("message_group", pa.string()), ("x", declared)])
    assert made["x"].to_pylist() == found


def test_names_are_told_apart_as_the_store_does() -> None:
    known = pa.table({"message_group": ["a"], "Score": [1], "É": [2]})

    made = as_declared(known, pa.schema([("score", pa.int64()), ("é", pa.int64())]))

    assert made.to_pylist() == [{"message_group": "a", "score": 1, "é": None}]


MANY_DIGITS = [2**60 + 1, 2**53 + 1, -(2**63), 5, None, 0]
HALVES = [1.5, 2.5, -2.5, -0.4, None, 126.5, 127.5, 1e300, math.nan, math.inf, 0.0]
PRICES = [Decimal("1.5"), Decimal("2.5"), Decimal("-2.5"), Decimal("999.9"), None, Decimal("0.1")]


@pytest.mark.parametrize(
    ("recorded", "declared"),
    [
        *((pa.array(HALVES), each) for each in (pa.int64(), pa.int8(), pa.uint8(), pa.uint64())),
        *((pa.array(PRICES, pa.decimal128(4, 1)), each) for each in (pa.int64(), pa.int8())),
        *((pa.array(MANY_DIGITS), each) for each in (pa.float64(), pa.float32(), pa.int32())),
    ],
)
def test_numbers_become_what_the_store_makes_of_them(
    recorded: pa.Array, declared: pa.DataType
) -> None:
    """So it does not matter whether another message group has changed the column before."""
    groups = [f"g{i}" for i in range(len(recorded))]

    made = as_declared(
        pa.table({"message_group": groups, "x": recorded}), pa.schema([("x", declared)])
    )

    old = pa.table({"x": recorded})
    known_as = duckdb.from_arrow(pa.schema([("x", declared)]).empty_table()).types[0]
    changed = duckdb.from_arrow(old).project(f"TRY_CAST(x AS {known_as}) AS x").fetchall()
    assert made["x"].to_pylist() == [value for (value,) in changed]


def test_columns_are_those_declared_in_their_order() -> None:
    known = pa.table({"of_old": [1], "n": [2], "message_group": ["a"]})

    made = as_declared(known, pa.schema([("last", pa.string()), ("n", pa.int64())]))

    assert made.to_pylist() == [{"message_group": "a", "last": None, "n": 2}]
    assert as_declared(known.slice(0, 0), N).num_rows == 0


def test_a_consumer_goes_on_when_its_state_gets_a_column(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def first(_messages: pa.Table, _state: pa.Table) -> Outcome:
        return Outcome(state=pa.table({"n": [1]}, schema=N))

    def second(_messages: pa.Table, state: pa.Table) -> Outcome:
        seen.extend(state.to_pylist())
        return Outcome(state=pa.table({"n": [2], "last": ["x"]}, schema=N_AND_LAST))

    def window(broker: Broker, handler: Handler, *, state: pa.Schema) -> int:
        broker.send("steps", pa.table({"body": [b"x"], "message_group": ["a"]}))
        spec = ConsumerSpec(
            name="walkers",
            topic="steps",
            group="walkers",
            handler=handler,
            order_by="message_group",
            state=state,
        )
        return run_window(spec, broker, owner="test", idle_s=0.2).acked

    settings = Settings(reserve_bytes=1 << 20)
    with Broker.open(tmp_path / "home", upkeep="none", settings=settings) as broker:
        broker.create_topic("steps", type="fifo", queues=1)
        broker.create_group("walkers", order="message_group")
        acked = [window(broker, first, state=N)]
        acked += [window(broker, second, state=N_AND_LAST) for _ in range(2)]

    assert acked == [1, 1, 1]
    assert seen == [{"n": 1, "last": None}, {"n": 2, "last": "x"}]


def test_a_state_without_nulls_may_be_removed_while_another_is_set(tmp_path: Path) -> None:
    seen: list[list[dict[str, Any]]] = []

    def counting(messages: pa.Table, state: pa.Table) -> Outcome:
        if messages["message_group"][0].as_py() == "gone":
            return Outcome(state=NEVER_NULL.empty_table())
        seen.append(state.to_pylist())
        return Outcome(state=pa.table({"n": [len(seen)]}, schema=NEVER_NULL))

    settings = Settings(reserve_bytes=1 << 20)
    with Broker.open(tmp_path / "home", upkeep="none", settings=settings) as broker:
        broker.create_topic("steps", type="fifo", queues=1)
        broker.create_group("walkers", order="message_group")
        spec = ConsumerSpec(
            name="walkers",
            topic="steps",
            group="walkers",
            handler=counting,
            order_by="message_group",
            state=NEVER_NULL,
        )
        acked = []
        for _ in range(2):
            broker.send("steps", pa.table({"body": [b"x"] * 2, "message_group": ["a", "gone"]}))
            acked.append(run_window(spec, broker, owner="x", idle_s=0.2, parallelism=2).acked)

    assert acked == [2, 2]
    assert seen == [[], [{"n": 1}]]


def test_what_cannot_be_cast_is_null_where_none_was_declared() -> None:
    known = pa.table({"message_group": ["a", "b"], "n": ["1", "many"]})

    made = as_declared(known, NEVER_NULL)

    assert made["n"].to_pylist() == [1, None]
    assert made.schema.field("n").nullable
