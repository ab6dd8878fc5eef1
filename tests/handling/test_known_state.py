"""Recorded state in the columns that a consumer declares today."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.window import run_window
from rmq_pipeline.handling.handler import Handler, Outcome
from rmq_pipeline.handling.known_state import as_declared
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.settings import Settings

N = pa.schema([("n", pa.int64())])
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
    ],
)
def test_what_cannot_be_cast_is_null(
    recorded: pa.Array, declared: pa.DataType, found: list[Any]
) -> None:
    known = pa.table({"message_group": ["a", "b"], "x": recorded})

    made = as_declared(known, pa.schema([("x", declared)]))

    assert made.schema == pa.schema([("message_group", pa.string()), ("x", declared)])
    assert made["x"].to_pylist() == found


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
