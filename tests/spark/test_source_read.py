"""Batch reads of topics through Spark's data source: what is read is what the broker has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import schema
from tests.spark.source_broker import TOPIC, Served, places

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def served(tmp_path: Path, spark: SparkSession) -> Iterator[Served]:
    with Served(tmp_path / "home", spark) as served:
        served.broker.create_topic(TOPIC, type="fifo", queues=3)
        yield served


def test_sealed_and_unsealed_messages_are_read_with_all_their_columns(served: Served) -> None:
    served.send(300)
    served.seal()
    served.send(200)
    served.seal()
    served.send(100)

    found = served.read()

    assert found.cast(schema.READ).equals(served.stored())
    assert set(served.frame().select("topic").distinct().toArrow()["topic"].to_pylist()) == {TOPIC}


def test_a_range_of_offsets_is_read_across_segments_and_what_is_not_sealed(served: Served) -> None:
    for _ in range(3):
        served.send(100)
        served.seal()
    served.send(100)
    ends = served.ends()
    start = {queue: end // 5 for queue, end in ends.items()}
    stop = {queue: end - 3 for queue, end in ends.items()}

    found = served.read(startingOffsets=_json(start), endingOffsets=_json(stop), minPartitions=8)

    assert places(found) == {q: list(range(start[q], stop[q])) for q in ends}


def test_earliest_and_latest_may_stand_for_an_offset(served: Served) -> None:
    served.send(60)
    ends = served.ends()

    found = served.read(
        startingOffsets=_json({0: -2, 1: 4, 2: ends[2]}),
        endingOffsets=_json({0: 5, 1: -1, 2: -1}),
    )

    assert places(found) == {0: list(range(5)), 1: list(range(4, ends[1]))}


def test_a_range_of_times_is_read(served: Served) -> None:
    began = served.clock.now_ms()
    for i in range(6):
        served.send(30)
        served.clock.advance(1_000)
        if i == 2:
            served.seal()

    found = served.read(startingTimestamp=began + 1_000, endingTimestamp=began + 5_000)

    times = served.stored()["stored_at_ms"].to_pylist()
    expected = [at for at in times if began + 1_000 <= at < began + 5_000]
    assert len(expected) == 120
    assert sorted(found["stored_at_ms"].to_pylist()) == sorted(expected)


def test_times_may_be_those_of_each_queue(served: Served) -> None:
    began = served.clock.now_ms()
    served.send(60)
    middle = served.ends()
    served.clock.advance(1_000)
    served.send(60)
    ends = served.ends()

    found = served.read(
        startingOffsetsByTimestamp=_json({0: began, 1: began + 1_000, 2: began + 1}),
        endingOffsetsByTimestamp=_json({0: began + 1_000, 1: began + 9_000, 2: began + 2}),
    )

    assert places(found) == {0: list(range(middle[0])), 1: list(range(middle[1], ends[1]))}


def test_topics_are_read_together(served: Served) -> None:
    served.broker.create_topic("refunds", queues=1)
    served.send(10)
    served.send(7, "refunds")

    counted = served.frame(subscribe=f"{TOPIC}, refunds").groupBy("topic").count().collect()

    assert {row["topic"]: row["count"] for row in counted} == {TOPIC: 10, "refunds": 7}


def test_an_empty_topic_has_no_rows(served: Served) -> None:
    assert served.read().num_rows == 0


def test_a_read_with_a_schema_has_only_its_columns(served: Served) -> None:
    served.send(20)
    served.seal()
    served.send(5)

    found = served.frame("body string, topic string, queue_offset bigint").toArrow()

    assert found.column_names == ["body", "topic", "queue_offset"]
    assert sorted(map(int, found["body"].to_pylist())) == list(range(25))


def test_properties_may_be_left_out(served: Served) -> None:
    served.send(1)

    assert "properties" not in served.frame(includeHeaders="false").columns


@pytest.mark.parametrize(
    ("options", "tasks"),
    [({}, 3), ({"minPartitions": 7}, 9), ({"maxRecordsPerPartition": 20}, 15)],
)
def test_queues_are_cut_into_tasks(served: Served, options: dict[str, Any], tasks: int) -> None:
    served.broker.delete_topic(TOPIC)
    served.broker.create_topic(TOPIC, queues=3)
    served.send(300)
    assert served.ends() == {0: 100, 1: 100, 2: 100}

    frame = served.frame(**options)

    assert frame.rdd.getNumPartitions() == tasks
    assert frame.count() == 300


def test_sealed_messages_are_read_without_the_broker(served: Served) -> None:
    served.send(300)
    served.seal()
    frame = served.frame(minPartitions=6)
    assert frame.rdd.getNumPartitions() >= 6  # it is planned, which does ask the broker
    served.shut()

    assert frame.toArrow().num_rows == 300


def test_a_planned_read_outlives_the_files_it_was_planned_with(
    served: Served, tmp_path: Path
) -> None:
    for _ in range(4):
        served.send(70)
        served.seal()
    expected = served.stored()
    frame = served.frame()
    assert frame.rdd.getNumPartitions() == 3  # it is planned
    files = set((tmp_path / "home" / "topics").glob("*/*/.segments/*/*.kept"))

    assert served.broker.compact()["compactions"] > 0
    served.clock.advance(3_600_000)
    served.broker.expire()

    assert not all(file.exists() for file in files)
    assert frame.toArrow().num_rows == expected.num_rows


def _json(queues: dict[int, int]) -> str:
    return json.dumps({TOPIC: {str(queue): at for queue, at in queues.items()}})
