"""The Spark job of a micro-batch: its parts travel, are walked, and come back."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.errors import RequestError
from rmq_pipeline.handling import sink
from rmq_pipeline.handling.batch import cut
from rmq_pipeline.handling.executor import Work
from rmq_pipeline.handling.group_walk import Rules
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.handling.results import BatchResult
from rmq_pipeline.spark.consumer import SparkEngine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

SINK = pa.schema(
    [("message_group", pa.string()), ("body", pa.binary()), ("born_at_ms", pa.int64())]
)
STATE = pa.schema([("seen", pa.int64()), ("names", pa.list_(pa.string()))])


def count(messages: pa.Table, state: pa.Table) -> Outcome:
    """Counts a group's messages; a body of ``bad`` raises."""
    if b"bad" in messages["body"].to_pylist():
        raise ValueError("a bad body")
    seen = messages.num_rows + (state["seen"][0].as_py() if state.num_rows else 0)
    return Outcome(
        rows=messages.select(SINK.names),
        state=pa.table({"seen": [seen], "names": [["n"]]}, schema=STATE),
        publish={"onward": messages.select(["body"])},
    )


def received(groups: list[str], bodies: list[bytes]) -> pa.Table:
    n = len(groups)
    columns = {
        "queue_id": [0] * n,
        "queue_offset": list(range(n)),
        "message_group": groups,
        "body": bodies,
        "born_at_ms": list(range(n)),
        "receipt_handle": [f"receipt {i}" for i in range(n)],
    }
    fields = [pa.array(columns.get(f.name, [None] * n), f.type) for f in schema.RECEIVED]
    return pa.table(fields, schema=schema.RECEIVED)


def worked(spark: SparkSession, work: Work) -> BatchResult:
    with SparkEngine(lambda: spark, parallelism=2) as engine:
        return engine.task(work, Event())()


@pytest.mark.parametrize("body_bytes", [10, 200_000])  # within a row, and in files beside it
def test_a_batch_comes_back_whole(spark: SparkSession, tmp_path: Path, body_bytes: int) -> None:
    groups = [f"g{i % 7}" for i in range(50)]
    bodies = [b"x" * body_bytes if i != 15 else b"bad" for i in range(50)]
    (batch,) = cut(received(groups, bodies), number=0, batches=1, parts=2, ordered=True)
    known = pa.table({"message_group": ["g3"], "seen": [100], "names": [None]})
    known = known.cast(pa.schema([("message_group", pa.string()), *STATE]))
    rules = Rules(count, True, STATE, SINK, "born_at_ms", {"onward": "normal"})

    result = worked(spark, Work(rules, batch, known, sink=tmp_path / "sink", epoch=3))

    outcomes = batch.outcomes(result.exceptions, run_id="run")
    # g1 has the messages 1, 8, 15 (bad), 22, 29, 36, 43: the last four are given back.
    failed = outcomes.filter(pa.compute.not_equal(outcomes["outcome"], "ack")).to_pylist()
    assert [row["receipt_handle"] for row in failed] == ["receipt 15"]
    assert failed[0]["reason"] == "ValueError: a bad body"
    assert failed[0]["error_type"] == "ValueError"
    assert outcomes.num_rows == 50 - 4
    assert result.publish["onward"].num_rows == 45
    assert result.state is not None
    assert {r["message_group"]: r["seen"] for r in result.state.to_pylist()} == {
        "g0": 8, "g1": 2, "g2": 7, "g3": 107, "g4": 7, "g5": 7, "g6": 7,
    }  # fmt: skip
    assert sum(result.files["rows"].to_pylist()) == 45
    sink.publish_manifest(tmp_path / "sink", result.files)
    assert sink.read_sink(tmp_path / "sink")["body"].to_pylist().count(b"bad") == 0


def where(_: pa.Table, __: pa.Table) -> Outcome:
    """A row a call: the task that it is made in."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    row = {"body": str(context.partitionId()).encode(), "born_at_ms": 0}
    return Outcome(rows=pa.Table.from_pylist([{"message_group": None, **row}], schema=SINK))


def test_each_part_is_a_task_of_its_own(spark: SparkSession, tmp_path: Path) -> None:
    groups = [f"g{i}" for i in range(10)]
    (batch,) = cut(received(groups, [b"x"] * 10), number=0, batches=1, parts=2, ordered=False)
    rules = Rules(where, ordered=False, sink_schema=SINK, partition_time="born_at_ms")

    result = worked(spark, Work(rules, batch, None, sink=tmp_path / "sink", epoch=3))

    sink.publish_manifest(tmp_path / "sink", result.files)
    assert sorted(sink.read_sink(tmp_path / "sink")["body"].to_pylist()) == [b"0", b"1"]


def test_workers_without_the_module_of_the_handler_are_named(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("only_the_driver_has_this")
    exec("def handle(messages, state):\n    raise AssertionError", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (batch,) = cut(received(["g"], [b"x"]), number=0, batches=1, parts=1, ordered=False)
    rules = Rules(module.handle, ordered=False)

    with pytest.raises(RequestError, match="have no module only_the_driver_has_this") as raised:
        worked(spark, Work(rules, batch, None, sink=None, epoch=1))

    assert "spark.submit.pyFiles" in str(raised.value)
