"""A broker behind its table endpoint, and its topics as Spark reads and writes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.settings import Settings
from tests.broker.sealed_home import seal_all

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPIC: Final = "orders"


class Served:
    """A context manager; ``broker`` has the verbs."""

    def __init__(self, home: Path, spark: SparkSession) -> None:
        self.spark, self.clock = spark, ManualClock()
        settings = Settings(
            reserve_bytes=1 << 20, log_file_bytes=1 << 20, seal_after_ms=0, compact_min_inputs=2
        )
        self.broker = Broker.open(home, clock=self.clock, upkeep="none", settings=settings)
        self._server = FlightServer(self.broker)
        self.endpoint = self._server.address
        self._sent = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut()
        self.broker.close()

    def shut(self) -> None:
        """Close the endpoint: no client reaches the broker any more."""
        self._server.shutdown()

    def send(self, n: int, topic: str = TOPIC, **columns: list[Any]) -> None:
        """Messages with every column filled, numbered from the last on."""
        numbers = range(self._sent, self._sent + n)
        self._sent += n
        ordered = self.broker.describe_topic(topic)["type"] == "fifo"
        table = {
            "body": [str(i).encode() for i in numbers],
            "tag": [f"t{i % 3}" for i in numbers],
            "keys": [[f"k{i}", "all"] for i in numbers],
            "message_group": [f"g{i % 7}" if ordered else None for i in numbers],
            "properties": [{"number": str(i)} for i in numbers],
            "born_at_ms": [1_000 + i for i in numbers],
            **columns,
        }
        fields = [schema.SEND.field(name) for name in table]
        self.broker.send(topic, pa.table(list(table.values()), schema=pa.schema(fields)))

    def seal(self) -> None:
        """What was sent is in segments."""
        assert seal_all(self.broker)["segments"]

    def stored(self, topic: str = TOPIC) -> pa.Table:
        """All messages as the broker reads them."""
        offsets = self.broker.describe_topic(topic)["offsets"]
        read = self.broker.read
        return pa.concat_tables(
            read(topic, q["queue_id"], offset=q["min_offset"], limit=1_000_000) for q in offsets
        )

    def ends(self, topic: str = TOPIC) -> dict[int, int]:
        """The max_offset of each queue."""
        offsets = self.broker.describe_topic(topic)["offsets"]
        return {q["queue_id"]: q["max_offset"] for q in offsets}

    def frame(self, ddl: str = "", **options: Any) -> DataFrame:
        """A batch read of the topic."""
        given = {"endpoint": self.endpoint, "subscribe": TOPIC, **options}
        chosen = {name: value for name, value in given.items() if value is not None}
        reader = self.spark.read.format("rocketmq").options(**chosen)
        return (reader.schema(ddl) if ddl else reader).load()

    def read(self, **options: Any) -> pa.Table:
        """What a batch read gives, as the broker would: without the topic, in order."""
        found = self.frame(**options).toArrow().drop_columns(["topic"])
        return found.sort_by([("queue_id", "ascending"), ("queue_offset", "ascending")])


def places(table: pa.Table) -> dict[int, list[int]]:
    """The offsets of each queue."""
    found: dict[int, list[int]] = {}
    pairs = zip(table["queue_id"].to_pylist(), table["queue_offset"].to_pylist(), strict=True)
    for queue, offset in pairs:
        found.setdefault(queue, []).append(offset)
    return found
