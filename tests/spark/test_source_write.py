"""Writing to topics through Spark's data source: what is stored, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.errors import PySparkException

from rmq_pipeline.errors import BrokerUnavailableError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.spark.source import by_message_group
from rmq_pipeline.spark.source.options import Address, WriteOptions
from rmq_pipeline.spark.source.writer import Sent, pieces, send, send_all
from tests.spark.source_broker import TOPIC, Served

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

GROUPS: Final = 250
PAIRS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))


@pytest.fixture
def served(tmp_path: Path, spark: SparkSession) -> Iterator[Served]:
    with Served(tmp_path / "home", spark) as served:
        served.broker.create_topic(TOPIC, type="fifo", queues=4, deduplicate="message_id")
        yield served


def write(served: Served, frame: DataFrame, **options: str) -> None:
    chosen = {"endpoint": served.endpoint, **(options or {"topic": TOPIC})}
    frame.write.format("rocketmq").options(**chosen).mode("append").save()


def numbered(spark: SparkSession, n: int) -> DataFrame:
    """Messages 0 to n in no order, each of one of GROUPS message groups."""
    frame = spark.range(n).selectExpr(
        "id", "CAST(id AS STRING) AS body", f"concat('g', id * 7919 % {GROUPS}) AS message_group"
    )
    return frame.repartition(3, "body")


def assert_groups_in_order(stored: pa.Table, n: int) -> None:
    numbers = stored["body"].cast(pa.string()).cast(pa.int64())
    rows = pa.table([stored["message_group"], stored["queue_id"], numbers], ["g", "q", "n"])
    groups = rows.group_by("g", use_threads=False).aggregate([("n", "list"), ("q", "min_max")])
    assert pc.count_distinct(numbers).as_py() == stored.num_rows == n
    assert groups.num_rows == GROUPS
    assert all(found == sorted(found) for found in groups["n_list"].to_pylist())


def test_a_hundred_thousand_messages_keep_the_order_of_their_groups(served: Served) -> None:
    frame = by_message_group(numbered(served.spark, 100_000), "id", tasks=4)

    write(served, frame.drop("id"))

    assert_groups_in_order(served.stored(), 100_000)


def test_every_column_of_a_message_is_written(served: Served) -> None:
    row = {
        "body": b"\x00\xff",
        "tag": "t",
        "keys": ["k1", "k2"],
        "message_group": "g",
        "born_at_ms": 12,
        "message_id": "mine",
        "properties": {"a": "1"},
    }
    ddl = (
        "body binary, tag string, keys array<string>, message_group string, born_at_ms bigint,"
        " message_id string, properties map<string,string>"
    )

    write(served, served.spark.createDataFrame([tuple(row.values())], ddl))

    (found,) = served.stored().to_pylist()
    found["properties"] = dict(found["properties"])
    assert {name: found[name] for name in row} == row


def test_keys_and_properties_may_be_null_for_all_or_some(served: Served) -> None:
    """Spark, which is slow with null lists and maps, is given empty ones."""
    frame = numbered(served.spark, 30_000).selectExpr(
        "*",
        "IF(id % 2 = 0 AND id < 10, array('k'), NULL) AS keys",
        "CAST(NULL AS MAP<STRING,STRING>) AS properties",
    )

    write(served, by_message_group(frame, "id", tasks=2).drop("id"))

    stored = served.stored()
    assert_groups_in_order(stored, 30_000)
    assert stored["keys"].null_count == 30_000 - 5
    assert pc.drop_null(stored["keys"]).to_pylist() == [["k"]] * 5
    assert set(pc.list_value_length(stored["properties"].cast(PAIRS)).to_pylist()) <= {0, None}


def test_delayed_messages_come_at_their_time(served: Served) -> None:
    served.broker.create_topic("late", type="delay", queues=1)
    due = served.clock.now_ms() + 5_000
    rows = [("by time", due, None), ("by level", None, 1)]
    ddl = "body string, deliver_at_ms bigint, delay_level int"

    write(served, served.spark.createDataFrame(rows, ddl), topic="late")

    assert served.ends("late") == {0: 0}
    served.clock.advance(1_000)
    served.broker.deliver_scheduled()
    assert served.stored("late")["body"].to_pylist() == [b"by level"]
    served.clock.advance(4_000)
    served.broker.deliver_scheduled()
    assert served.stored("late")["body"].to_pylist() == [b"by level", b"by time"]


def test_rows_may_name_their_topics(served: Served) -> None:
    for name in ("a", "b"):
        served.broker.create_topic(name, queues=1)
    frame = served.spark.range(20, numPartitions=1).selectExpr(
        "CAST(id AS STRING) AS body", "IF(id % 3 = 0, 'a', 'b') AS topic"
    )

    write(served, frame, endpoint=served.endpoint)

    for name, expected in {
        "a": [i for i in range(20) if i % 3 == 0],
        "b": [i for i in range(20) if i % 3],
    }.items():
        assert list(map(int, served.stored(name)["body"].to_pylist())) == expected


class Deaf:
    """A client that hears no answer of its first sends."""

    def __init__(self, client: Client) -> None:
        self._client, self.left = client, 2

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def send(self, topic: str, messages: pa.Table) -> pa.Table:
        answer = self._client.send(topic, messages)
        if self.left:
            self.left -= 1
            raise BrokerUnavailableError("lost")
        return answer


def test_a_send_without_an_answer_is_made_again_where_nothing_is_stored_twice(
    served: Served,
) -> None:
    served.broker.create_topic("plain", queues=1)
    rows = pa.table({"body": [b"x"], "message_id": ["m"], "message_group": ["g"]})
    with Client(served.endpoint) as client:
        answer = send(cast(Client, Deaf(client)), TOPIC, messages=rows, repeatable=True)
        plain = rows.drop_columns(["message_group"])
        with pytest.raises(BrokerUnavailableError):
            send(cast(Client, Deaf(client)), "plain", messages=plain, repeatable=False)

    assert answer["duplicate"].to_pylist() == [True]
    assert served.stored().num_rows == served.stored("plain").num_rows == 1


def test_a_second_attempt_of_a_task_stores_nothing_twice(served: Served) -> None:
    options = WriteOptions(Address(served.endpoint, None), TOPIC)
    rows = [{"body": str(i).encode(), "message_group": "g"} for i in range(50)]
    batches = pa.Table.from_pylist(rows).to_batches(max_chunksize=20)
    send_all(options, iter(batches[:2]), job="j")  # then its executor is killed

    second = send_all(options, iter(batches), job="j")

    assert second == Sent(messages=10, duplicates=40)
    assert list(map(int, served.stored()["body"].to_pylist())) == list(range(50))


def test_a_streamed_batch_that_comes_again_stores_nothing_twice(
    served: Served, tmp_path: Path
) -> None:
    served.broker.create_topic("copied", type="fifo", queues=1, deduplicate="message_id")
    served.send(40)
    stream = (
        served.spark.readStream.format("rocketmq")
        .options(endpoint=served.endpoint, subscribe=TOPIC, startingOffsets="earliest")
        .load()
        .select("body", "message_group")
    )

    def run() -> None:
        query = (
            stream.coalesce(1)
            .writeStream.format("rocketmq")
            .options(endpoint=served.endpoint, topic="copied")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run()
    (tmp_path / "checkpoint" / "commits" / "0").unlink()  # killed before it was written down
    (tmp_path / "checkpoint" / "commits" / ".0.crc").unlink(missing_ok=True)
    run()

    assert sorted(map(int, served.stored("copied")["body"].to_pylist())) == list(range(40))


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ("'x' AS body", {"topic": "nowhere"}, "no topic nowhere"),
        ("'x' AS text", {"topic": TOPIC}, "Column text is not a column of a message"),
        ("'x' AS tag", {"topic": TOPIC}, "no column body"),
        ("'x' AS body", {"queues": "3"}, "no option queues"),
        ("'x' AS body, 't' AS topic", {"topic": TOPIC}, "Name the topic once"),
        ("'x' AS body", {"topic": TOPIC}, "message_group"),
    ],
)
def test_what_cannot_be_sent_is_refused(
    served: Served, columns: str, options: dict[str, str], said: str
) -> None:
    frame = served.spark.range(1).selectExpr(*columns.split(", "))

    with pytest.raises(PySparkException, match=said):
        write(served, frame, endpoint=served.endpoint, **options)


def test_large_bodies_are_sent_in_pieces() -> None:
    sizes = [3 << 20] * 12 + [1] * 50_000
    table = pa.table({"body": pa.array([bytes(n) for n in sizes], pa.binary())})

    found = list(pieces(table))

    assert pa.concat_tables(found).equals(table)
    assert all(piece.num_rows <= 20_000 for piece in found)
    assert all(pc.sum(pc.binary_length(p["body"])).as_py() < 20 << 20 for p in found)
