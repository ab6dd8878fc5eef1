"""What replays send: what handlers publish, and messages that go into another topic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import RequestError
from rmq_pipeline.spark.replay.publishing import TopicPlan, publish_again
from tests.spark.handlers import numbered
from tests.spark.replayed import HOUR_MS, Consumer, replayed_broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with replayed_broker(tmp_path / "home") as broker:
        yield broker


@pytest.fixture
def consumer(broker: Broker, tmp_path: Path, spark: SparkSession) -> Consumer:
    return Consumer(broker, tmp_path, spark)


def test_what_the_handler_publishes_is_sent_once_when_asked(consumer: Consumer) -> None:
    consumer.broker.alter_topic("later", deduplicate="message_id")
    consumer.send("on-a", "b", "on-a", "on-c", hour=0)
    consumer.consume()
    settings = {"mode": "side_sink", "side_sink": consumer.folder / "side", "handler": numbered}

    usual = consumer.again(0, 1, **settings)
    first = consumer.again(0, 1, publish=True, **settings)
    again = consumer.again(0, 1, publish=True, **settings)
    other = consumer.again(0, 1, publish=True, replay_id="another", **settings)

    assert (usual.not_published, usual.published) == ({"later": 3}, {})
    assert (first.not_published, first.published) == ({}, {"later": 3})
    assert (again.published, other.published) == ({"later": 0}, {"later": 3})
    # Three of the group itself, and twice those of replays.
    scheduled = consumer.broker.sql("SELECT count(*) AS n FROM scheduled")["n"][0].as_py()
    delivered = consumer.broker.describe_topic("later")["offsets"]
    assert scheduled + sum(queue["max_offset"] for queue in delivered) == 9


def test_a_replay_of_other_hours_under_its_id_publishes_no_message_twice(
    consumer: Consumer,
) -> None:
    consumer.broker.alter_topic("later", deduplicate="message_id")
    for hour in range(3):
        consumer.send("on-a", "on-b", "on-a", "on-a", "on-b", hour=hour)
    consumer.consume()
    settings: dict[str, Any] = {"mode": "side_sink", "publish": True, "handler": numbered}

    hours = [(1, 2), (0, 2), (0, 3), (2, 3)]
    runs = [
        consumer.again(first, end, side_sink=consumer.folder / f"side-{first}-{end}", **settings)
        for first, end in hours
    ]

    assert [run.published for run in runs] == [{"later": n} for n in (5, 5, 5, 0)]


def test_publishing_is_refused_where_it_could_happen_twice(consumer: Consumer) -> None:
    consumer.send("on-a", hour=0)
    consumer.consume()

    with pytest.raises(RequestError, match="does not deduplicate by message_id"):
        consumer.again(0, 1, publish=True)
    with pytest.raises(RequestError, match="dry run"):
        consumer.again(0, 1, publish=True, mode="dry_run")


def test_runs_of_one_replay_do_not_take_each_others_messages_for_repetitions(
    consumer: Consumer,
) -> None:
    """A backfill with a gap, or of two consumers, has several runs under one id."""
    consumer.broker.alter_topic("later", deduplicate="message_id")
    consumer.broker.create_group("others", order="message_group")
    consumer.send("on-a", "on-b", hour=0)
    consumer.send("on-a", "on-b", hour=2)
    consumer.consume()
    other = {"group": "others", "sink": consumer.folder / "others"}
    consumer.consume(**other)
    settings = {"mode": "side_sink", "publish": True, "handler": numbered}
    mine = {**settings, "side_sink": consumer.folder / "mine"}
    theirs = {**settings, "side_sink": consumer.folder / "theirs", **other}

    runs = [consumer.again(0, 1, **mine), consumer.again(2, 3, **mine)]
    runs += [consumer.again(0, 1, **theirs), consumer.again(2, 3, **theirs)]
    repeated = consumer.again(2, 3, **theirs)

    assert [run.published for run in runs] == [{"later": 2}] * 4
    assert repeated.published == {"later": 0}


def test_topics_that_are_copied_into_one_lose_no_message(
    broker: Broker, tmp_path: Path, spark: SparkSession
) -> None:
    """A backfill of the consumers of several topics has one id, and their places are alike."""
    for name in ("one", "two"):
        broker.create_topic(name, queues=1, partition_time="born")
        broker.send(name, pa.table({"body": [name.encode()], "born_at_ms": [1]}))

    def copy(topic: str) -> int:
        plan = TopicPlan(
            topic=topic,
            from_ms=0,
            to_ms=HOUR_MS,
            side_topic="both",
            replay_id="backfill",
            folder=tmp_path / "replays",
        )
        return publish_again(plan, broker, spark=lambda: spark).stored  # type: ignore[arg-type]

    stored = [copy(topic) for topic in ("one", "two", "two")]

    assert stored == [1, 1, 0]
    assert broker.read("both", 0, offset=0, limit=9)["body"].to_pylist() == [b"one", b"two"]
