"""From rows to messages and back: a sink's rows, files and runs, and the message they came of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.handling.handler import (
    ORIGIN,
    Handler,
    OutcomeError,
    with_origin,
    with_origin_columns,
)
from rmq_pipeline.lake import compaction, readers
from rmq_pipeline.lake.rows import rows_of_message
from rmq_pipeline.settings import Settings
from rmq_pipeline.spark.consumer import ConsumerSpec, run_window
from tests.spark.handlers import SINK, STATE, numbered, placed

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

TOPIC, GROUP = "steps", "walkers"
HOUR_MS = 3_600_000


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    settings = Settings(reserve_bytes=1024 * 1024)
    with Broker.open(tmp_path / "home", upkeep="none", settings=settings) as broker:
        broker.create_topic(TOPIC, type="fifo", queues=3)
        broker.create_topic("later", type="mixed")
        broker.create_group(GROUP, order="message_group")
        yield broker


def consumer(folder: Path, handler: Handler, **changes: Any) -> ConsumerSpec:
    settings: dict[str, Any] = {
        "name": "walkers",
        "topic": TOPIC,
        "group": GROUP,
        "handler": handler,
        "sink": folder / "sink",
        "sink_schema": SINK,
        "sink_offsets": True,
        "publishes": ("later",),
    }
    return ConsumerSpec(**{**settings, **changes})


def send(broker: Broker, n: int, *, hours: int = 2, first: int = 0) -> pa.Table:
    """Messages m0, m1, … of three groups, in so many hours."""
    numbers = range(first, first + n)
    columns = {
        "message_id": [f"m{i}" for i in numbers],
        "body": [str(i).encode() for i in numbers],
        "message_group": [f"g{i % 3}" for i in numbers],
        "born_at_ms": [i % hours * HOUR_MS for i in numbers],
    }
    return broker.send(TOPIC, pa.table(columns))


def places(broker: Broker) -> dict[str, tuple[int, int]]:
    """Where each body lies."""
    found = {}
    for queue_id in range(3):
        for row in broker.read(TOPIC, queue_id, offset=0, limit=1_000).to_pylist():
            found[row["body"].decode()] = (queue_id, row["queue_offset"])
    return found


def files_of(broker: Broker, message_id: str) -> list[dict[str, Any]]:
    return list(broker.sql(f"SELECT * FROM files_of('{message_id}')").to_pylist())


@pytest.mark.spark
@pytest.mark.parametrize(
    ("handler", "ordered"),
    [(placed, {}), (numbered, {"order_by": "message_group", "state": STATE})],
)
def test_every_row_says_which_message_it_is_of(
    broker: Broker, spark: SparkSession, tmp_path: Path, handler: Handler, ordered: dict[str, Any]
) -> None:
    send(broker, 30)
    spec = consumer(tmp_path, handler, **ordered)

    run_window(spec, broker, spark=lambda: spark, owner="run-1", idle_s=0.2)

    table = readers.sink_table(tmp_path / "sink")
    assert table.schema == with_origin_columns(SINK)
    found = {
        row["body"].decode(): (row["queue_id"], row["queue_offset"]) for row in table.to_pylist()
    }
    assert found == places(broker)
    assert set(table["topic"].to_pylist()) == {TOPIC}
    assert sorted(ordered) != ["order_by", "state"] or sorted(table["step"].to_pylist()) == sorted(
        [*range(1, 11)] * 3
    )


@pytest.mark.spark
def test_a_message_leads_to_its_rows_their_file_and_the_run(
    broker: Broker, spark: SparkSession, tmp_path: Path
) -> None:
    send(broker, 12)
    spec = consumer(tmp_path, placed)
    run_window(spec, broker, spark=lambda: spark, owner="run-1", idle_s=0.2)
    queue_id, offset = places(broker)["7"]

    rows = rows_of_message(tmp_path / "sink", queue_id=queue_id, queue_offset=offset)
    may_hold = {file["partition"]: file for file in files_of(broker, "m7")}

    assert rows is not None
    (row,) = rows.to_pylist()
    assert row["body"] == b"7"
    file = may_hold["1970-01-01T01"]
    assert row["path"] == file["path"]
    assert (file["topic"], file["queue_id"], file["queue_offset"]) == (TOPIC, queue_id, offset)
    assert (file["consumer_group"], file["run_id"], file["counts"]) == (GROUP, "run-1", True)
    missing = rows_of_message(tmp_path / "sink", queue_id=queue_id, queue_offset=offset + 100)
    assert missing is None


@pytest.mark.spark
def test_a_message_is_followed_through_what_replaced_its_file(
    broker: Broker, spark: SparkSession, tmp_path: Path
) -> None:
    for number in range(2):
        send(broker, 4, hours=1, first=4 * number)
        run_window(
            consumer(tmp_path, placed), broker, spark=lambda: spark, owner="run-1", idle_s=0.2
        )
    before = {file["path"] for file in files_of(broker, "m1")}
    assert len(before) == 1
    opened = broker.open_window("upkeep/compact_sinks", owner="c", duration_ms=60_000)
    compaction.compact(
        broker,
        GROUP,
        sink=tmp_path / "sink",
        window=("upkeep/compact_sinks", opened["epoch"]),
        rules=compaction.Rules(quiet_ms=0),
    )

    files = files_of(broker, "m1")

    assert {file["path"] for file in files if not file["counts"]} == before
    (merged,) = {file["path"] for file in files if file["counts"]}
    assert merged.startswith("hour=1970-01-01T00/merged-")


@pytest.mark.spark
def test_spark_reads_what_counts(broker: Broker, spark: SparkSession, tmp_path: Path) -> None:
    send(broker, 12)
    run_window(consumer(tmp_path, placed), broker, spark=lambda: spark, owner="run", idle_s=0.2)

    frame = readers.spark_frame(spark, tmp_path / "sink")
    of_hour = readers.spark_frame(spark, tmp_path / "sink", partitions=["1970-01-01T01"])
    nothing = readers.spark_frame(spark, tmp_path / "empty", sink_schema=SINK)

    assert frame.columns == with_origin_columns(SINK).names
    assert sorted(int(row.body) for row in frame.collect()) == list(range(12))
    assert sorted(int(row.body) for row in of_hour.collect()) == [1, 3, 5, 7, 9, 11]
    assert (nothing.columns, nothing.count()) == (SINK.names, 0)


ONE = pa.table({"queue_id": pa.array([2], pa.int32()), "queue_offset": [7]})


def test_rows_of_one_message_are_its_own() -> None:
    rows = with_origin(pa.table({"n": [1, 2]}), ONE, topic="t")

    assert rows.to_pylist() == [
        {"n": n, "queue_id": 2, "queue_offset": 7, "topic": "t"} for n in (1, 2)
    ]


def test_rows_of_several_messages_say_of_which() -> None:
    two = pa.concat_tables([ONE, ONE])
    own = pa.table({"n": [1], "queue_id": pa.array([2], pa.int32()), "queue_offset": [7]})

    with pytest.raises(OutcomeError, match="queue_id"):
        with_origin(pa.table({"n": [1]}), two, topic="t")
    assert with_origin(own, two, topic="t")["topic"].to_pylist() == ["t"]


def test_a_column_of_that_name_has_its_type() -> None:
    with pytest.raises(ValueError, match="queue_id"):
        with_origin_columns(pa.schema([("queue_id", pa.string())]))
    assert with_origin_columns(ORIGIN) == ORIGIN


def test_offsets_need_a_sink(tmp_path: Path) -> None:
    without: dict[str, Callable[..., Any] | None] = {"sink": None, "sink_schema": None}

    with pytest.raises(ValueError, match="no sink"):
        consumer(tmp_path, placed, **without)
