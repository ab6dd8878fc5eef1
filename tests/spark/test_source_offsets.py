"""Offsets of the data source, asked of a broker as the driver does, without a JVM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import StructType

from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import ForbiddenError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.spark.source.offsets import subscribed
from rmq_pipeline.spark.source.options import for_batch, for_stream
from rmq_pipeline.spark.source.reader import QueuePartition, StreamReader
from tests.broker.sealed_home import messages, open_broker

TOKEN = "token-of-the-home"
PASSWORD = "ann-password"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with open_broker(tmp_path / "home") as broker:
        broker.create_topic("orders", queues=1)
        yield broker


def test_a_topic_made_again_during_a_query_is_read_to_the_end_that_it_then_has(
    broker: Broker,
) -> None:
    """The reader as Spark calls it in a query with Trigger.AvailableNow."""

    def made_again() -> None:
        broker.delete_topic("orders", force=True)
        broker.create_topic("orders", queues=1)

    server = FlightServer(broker)
    options = {
        "endpoint": server.address,
        "subscribe": "orders",
        "startingOffsets": "earliest",
        "failOnDataLoss": "false",
    }
    reader, limit = StreamReader(for_stream(options), StructType()), ReadMaxRows(50)
    broker.send("orders", messages(100))
    try:
        reader.prepareForTriggerAvailableNow()
        first = reader.latestOffset(reader.initialOffset(), limit)
        made_again()
        broker.send("orders", messages(5))
        second = reader.latestOffset(first, limit)
        parts = reader.partitions(first, second)
        broker.send("orders", messages(80))
        last = reader.latestOffset(second, limit)
    finally:
        reader.stop()
        server.shutdown()

    assert (first["orders"]["0"], second["orders"]["0"]) == (50, 5)
    assert first["orders"]["topic_id"] != second["orders"]["topic_id"]
    pieces = [part.pieces for part in parts if isinstance(part, QueuePartition)]
    assert [[(piece.start, piece.end) for piece in each] for each in pieces] == [[(0, 5)]]
    # The query ends here; the next one reads the 80 messages.
    assert last == second


def test_a_pattern_that_matches_a_topic_of_others_is_refused_with_its_name(
    broker: Broker,
) -> None:
    broker.create_topic("salaries", queues=1)
    broker.create_user("ann", password=PASSWORD)
    broker.put_policy("ann", resource="cluster:*", actions="list")
    broker.put_policy("ann", resource="topic:orders", actions=["get", "sub"])
    server = FlightServer(broker, token=TOKEN, access=broker.access)
    ann = Client(server.address, user="ann", password=PASSWORD, retry_s=0)

    def of(pattern: str) -> set[str]:
        options = {"endpoint": server.address, "subscribePattern": pattern}
        return set(subscribed(ann, for_batch(options)))

    try:
        narrow = of("ord.*")
        with pytest.raises(ForbiddenError) as refused:
            of(".*s")
    finally:
        ann.close()
        server.shutdown()

    assert narrow == {"orders"}
    assert "Topic salaries matches the subscribePattern '.*s'" in refused.value.message
    assert "Narrow the pattern" in refused.value.remedy
