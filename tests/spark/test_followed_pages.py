"""The pages with Spark: their blocks run in their order, on a real broker, in one session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline.consumer.window import run_window
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.handling.spec import ConsumerSpec
from tests.docs.preparations import shop
from tests.object_store import ObjectStore
from tests.page_reader import Reader
from tests.spark.handlers import SINK, STATE, numbered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
ROTATIONS = pa.schema([("tail", pa.string()), ("born_at_ms", pa.int64())])
#: 5:00 on 2013-01-01, and the first hour of the replay.
FIVE_MS, REPLAYED_MS = 1_357_016_400_000, 1_357_221_600_000


def rotations(messages: pa.Table, _: pa.Table) -> Outcome:
    """Return a row for each message."""
    columns = [messages["message_group"], messages["born_at_ms"]]
    return Outcome(rows=pa.table(columns, schema=ROTATIONS))


def departures(reader: Reader, born_ms: int, spec: ConsumerSpec, count: int = 10) -> None:
    """Send departures, and let a window of their consumer handle them."""
    columns = {
        "body": ["departure"] * count,
        "message_group": [f"N{n}" for n in range(count)],
        "born_at_ms": [born_ms] * count,
    }
    reader.client.send("departures", pa.table(columns))
    assert run_window(spec, reader.client, owner="me", idle_s=0.2).acked >= count


@pytest.fixture
def reader(tmp_path: Path, spark: SparkSession) -> Iterator[Reader]:
    """Read a page in Python that has a session and a client."""
    with Reader(tmp_path) as reader:
        shop(reader)
        reader.client.create_topic("departures", type="fifo")
        reader.client.create_group("rotations", order="message_group")
        reader.names["spark"] = spark
        yield reader


def test_the_page_of_sinks(reader: Reader, object_store: ObjectStore) -> None:
    reader.environment |= object_store.environment
    reader.environment["RMQ_SINKS"] = f"{reader.folder}/sinks"
    for sink in (f"{reader.folder}/sinks/aircraft_rotations", "s3://lake/sinks/aircraft_rotations"):
        group = f"to_{sink[:2].strip('/')}"
        reader.client.create_group(group, order="message_group")
        spec = ConsumerSpec(
            name=group,
            topic="departures",
            group=group,
            handler=rotations,
            order_by="message_group",
            sink=sink,
            sink_schema=ROTATIONS,
        )
        for _ in range(3):
            departures(reader, FIVE_MS, spec)
    # Spark's JVM has another current folder.
    reader.instead |= {
        "version=42": "version=1",
        "sinks/aircraft_rotations": f"{reader.folder}/sinks/aircraft_rotations",
        "s3://lake/sinks/aircraft_rotations": "s3://lake/sinks/aircraft_rotations",
    }

    reader.follow_page("docs/lake.md")

    reader.python(
        "assert set(table.to_pandas()['tail']) == {f'N{n}' for n in range(10)}\n"
        "assert sink_table('s3://lake/sinks/aircraft_rotations').num_rows == 60"
    )


def test_the_page_of_the_source(reader: Reader, spark: SparkSession) -> None:
    environment = spark.sparkContext.environment
    environment["RMQ_HOME"] = reader.environment["RMQ_HOME"]
    rows = [(f"event {n}", f"customer-{n % 3}", n) for n in range(9)]
    reader.names["events"] = spark.createDataFrame(
        rows, "body string, message_group string, event_time int"
    )
    reader.client.create_group("lake")
    reader.instead["lake/orders"] = f"{reader.folder}/lake/orders"
    write = (
        'events.select("body", "message_group").write.format("rocketmq").option("topic", "orders")'
    )
    reader.before = {
        f"{write}.mode(": end_the_stream,
        'client.create_topic("orders", type="fifo", deduplicate="message_id")': count_and_delete,
    }

    reader.follow_page("docs/spark_source.md")

    del environment["RMQ_HOME"]


def end_the_stream(reader: Reader) -> None:
    """Read what the stream has written, and stop it: it would take the time of what follows."""
    reader.python(
        "query.processAllAvailable()\n"
        "query.stop()\n"
        f"assert spark.read.parquet('{reader.folder}/lake/orders').count() == 20\n"
    )


def count_and_delete(reader: Reader) -> None:
    """Evaluate the frames of the page, and delete the topic that it creates again."""
    reader.python("assert (paid.count(), one_day.count(), orders.count()) == (20, 0, 38)")
    reader.client.delete_topic("orders")


def test_the_page_of_replays(reader: Reader) -> None:
    reader.client.create_topic("later", type="delay")
    spec = ConsumerSpec(
        name="rotations",
        topic="departures",
        group="rotations",
        handler=numbered,
        order_by="message_group",
        state=STATE,
        sink=f"{reader.folder}/sink",
        sink_schema=SINK,
        publishes=("later",),
    )
    departures(reader, REPLAYED_MS, spec)
    reader.names["consumer_spec"] = spec

    reader.follow_page("docs/replay.md")

    print(reader.names["report"])
    assert reader.names["report"].messages == 10
