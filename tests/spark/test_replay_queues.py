"""Where the tasks of a replay find messages: in queues, in files merged meanwhile, partitioned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import IllegalOffsetError
from rmq_pipeline.spark.replay.reading import Wanted, in_range
from rmq_pipeline.spark.replay.topic_log import Range, Stored
from tests.broker.sealed_home import seal_all
from tests.spark.handlers import shouted
from tests.spark.replayed import TOPIC, Consumer, replayed_broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

GROUPS = 12


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """Whose replaced files go at once."""
    with replayed_broker(tmp_path / "home", replaced_grace_ms=0) as broker:
        yield broker


@pytest.fixture
def consumer(broker: Broker, tmp_path: Path, spark: SparkSession) -> Consumer:
    return Consumer(broker, tmp_path, spark)


def fill(consumer: Consumer, *rounds: str, hour: int = 0) -> None:
    """Two messages of each group a round, consumed and sealed."""
    for name in rounds:
        consumer.send(*(f"{name}-{i}" for i in range(2 * GROUPS)), hour=hour, groups=GROUPS)
        consumer.consume()
        seal_all(consumer.broker)


def steps_of(*rounds: str) -> list[tuple[str, int, str]]:
    """The rows of ``fill``, in capitals."""
    return sorted(
        (f"g{g}", 2 * at + i + 1, f"{name}-{GROUPS * i + g}".upper())
        for at, name in enumerate(rounds)
        for g in range(GROUPS)
        for i in range(2)
    )


def told(consumer: Consumer) -> dict[str, dict[str, Any]]:
    """What the next replay says of its steps."""
    found: dict[str, dict[str, Any]] = {}
    consumer.on_progress = lambda what, facts: found.update({what: facts})
    return found


def test_message_groups_that_moved_when_the_topic_grew_are_replayed_in_order(
    consumer: Consumer,
) -> None:
    fill(consumer, "a", "b")
    consumer.broker.alter_topic(TOPIC, queues=9)
    fill(consumer, "c", "d")
    query = "SELECT message_group FROM messages GROUP BY ALL HAVING count(DISTINCT queue_id) > 1"
    assert consumer.broker.sql(query).num_rows > 2
    steps = told(consumer)

    report = consumer.again(0, 1, handler=shouted)

    assert steps["partitioning"] == {"files": 1}
    assert report.messages == 8 * GROUPS
    assert consumer.rows() == steps_of("a", "b", "c", "d")
    assert (report.states_differ, report.later) == (0, [])


def test_a_range_behind_the_growth_needs_no_dealing(consumer: Consumer) -> None:
    fill(consumer, "a")
    consumer.broker.alter_topic(TOPIC, queues=9)
    fill(consumer, "b", hour=1)
    fill(consumer, "c", hour=2)
    steps = told(consumer)

    report = consumer.again(2, 3, mode="dry_run", state=None, handler=shouted)

    assert "partitioning" not in steps
    assert report.messages == 2 * GROUPS


def test_messages_are_dealt_out_where_queues_are_too_few(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_pipeline.spark.replay.tasks.FEW_ROWS", 1)
    fill(consumer, "a", "b")
    steps = told(consumer)

    report = consumer.again(0, 1, handler=shouted, parallelism=7)

    assert steps["partitioning"] == {"files": 7}
    assert report.messages == 4 * GROUPS
    assert consumer.rows() == steps_of("a", "b")
    assert report.states_differ == 0


def test_a_replay_goes_on_while_its_files_are_merged_and_deleted(consumer: Consumer) -> None:
    names = [f"r{i}" for i in range(10)]
    fill(consumer, *names)
    merged = []

    def merge(what: str, _facts: dict[str, Any]) -> None:
        if what == "states":
            merged.append(consumer.broker.compact())
            # Their grace is over at once.
            consumer.broker.expire()

    consumer.on_progress = merge
    before = consumer.broker.archive()["files"]

    report = consumer.again(0, 1, handler=shouted)

    assert merged[0]["inputs"] == before > consumer.broker.archive()["files"] == 3
    assert report.messages == len(names) * 2 * GROUPS
    assert consumer.rows() == steps_of(*names)


def test_messages_that_expire_while_they_are_read_are_an_error(tmp_path: Path) -> None:
    wanted = Wanted(
        Range(topic="t", from_ms=0, to_ms=1, partition_time="stored"), str(tmp_path), {0: 10}
    )
    gone = Stored(str(tmp_path / "gone.parquet"), 0, 0, 10)
    (tmp_path / "_manifest.json").write_text('{"format": 2, "files": []}')

    with pytest.raises(IllegalOffsetError, match="expired during the replay"):
        list(in_range([gone], wanted, columns=["queue_offset"]))
