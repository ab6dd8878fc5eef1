"""Streaming reads of topics: every message once in the sink, and the broker knows how far it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from pyspark.errors import StreamingQueryException

from tests.conftest import Eventually
from tests.spark.source_broker import TOPIC, Served
from tests.spark.source_process import start

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

GROUP: Final = "lake"
LATE: Final = "Python worker failed to connect back"
STARTS: Final = 4
ROOT: Final = Path(__file__).parents[2]


@pytest.fixture
def served(tmp_path: Path, spark: SparkSession) -> Iterator[Served]:
    with Served(tmp_path / "home", spark) as served:
        served.broker.create_topic(TOPIC, type="fifo", queues=2)
        served.broker.create_group(GROUP)
        yield served


class Query:
    """A query from the topic into a Parquet sink, from its checkpoint on whenever it is started."""

    def __init__(self, served: Served, folder: Path, **source: Any) -> None:
        self.served, self.checkpoint, self.sink = served, folder / "checkpoint", folder / "sink"
        self.source = {
            "endpoint": served.endpoint,
            "subscribe": TOPIC,
            "startingOffsets": "earliest",
            "group": GROUP,
            **source,
        }

    def settings(self) -> dict[str, Any]:
        places = {"path": str(self.sink), "checkpointLocation": str(self.checkpoint)}
        return {"source": self.source, "sink": places}

    def run(self) -> list[int]:
        """Read what is there; how many messages each micro-batch had."""
        for tries_left in reversed(range(STARTS)):
            query = start(self.served.spark, **self.settings(), availableNow=True)
            try:
                query.awaitTermination()
            except StreamingQueryException as error:
                # Spark gives its Python process 10 s to start, which a busy machine may exceed.
                if LATE not in str(error) or not tries_left:
                    raise
            else:
                return [p.numInputRows for p in query.recentProgress]
        raise AssertionError("unreachable")

    def written(self, kind: str) -> set[str]:
        """The micro-batches in a folder of the checkpoint."""
        folder = self.checkpoint / kind
        return {p.name for p in folder.iterdir() if p.name.isdigit()} if folder.exists() else set()

    def numbers(self) -> list[int]:
        """The messages in the sink, as Spark reads it."""
        found = self.served.spark.read.parquet(str(self.sink)).select("body").toArrow()
        return sorted(int(body) for body in found["body"].to_pylist())


def lag(served: Served) -> int | None:
    rows = served.broker.sql(f"SELECT sum(lag) AS n FROM lag WHERE consumer_group = '{GROUP}'")
    found: int | None = rows["n"].to_pylist()[0]
    return found


def test_a_stream_goes_on_from_its_checkpoint(served: Served, tmp_path: Path) -> None:
    query = Query(served, tmp_path, maxOffsetsPerTrigger=40)
    served.send(60)
    served.seal()
    served.send(40)

    batches = query.run()

    assert [n for n in batches if n] == [40, 40, 20]
    assert lag(served) == 0
    served.send(50)
    assert lag(served) == 50
    assert sum(query.run()) == 50
    assert query.numbers() == list(range(150))
    assert lag(served) == 0


@pytest.mark.timeout(600)
def test_a_stream_that_is_killed_in_a_batch_loses_and_repeats_nothing(
    served: Served, tmp_path: Path, eventually: Eventually
) -> None:
    query = Query(served, tmp_path, maxOffsetsPerTrigger=50)
    served.send(700)
    served.seal()
    served.send(300)
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.source_process", json.dumps(query.settings())],
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: len(query.written("commits")) >= 3, within_s=300)
        eventually(lambda: query.written("offsets") - query.written("commits"))
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    done = len(query.written("commits"))
    before = lag(served)

    # The batch that was begun has its offsets in the checkpoint; the rest needs no small ones.
    query.source["maxOffsetsPerTrigger"] = 500
    query.run()

    assert done < 1000 // 50
    assert before is not None
    assert 1000 - 50 * done <= before <= 1000 - 50 * (done - 2)
    assert query.numbers() == list(range(1000))
    assert lag(served) == 0


def test_a_stream_reads_on_while_messages_come(
    served: Served, tmp_path: Path, eventually: Eventually
) -> None:
    query = Query(served, tmp_path)
    running = start(served.spark, **query.settings())
    try:
        for _ in range(3):
            served.send(20)
            eventually(lambda: lag(served) == 0, within_s=60)
        served.broker.alter_topic(TOPIC, queues=4)
        served.send(60)
        eventually(lambda: lag(served) == 0, within_s=60)
        # What has caught up makes no more batches.
        assert len(query.written("offsets")) <= 8
    finally:
        running.stop()

    assert query.numbers() == list(range(120))


def test_topics_that_match_a_pattern_join_a_running_stream(
    served: Served, tmp_path: Path, eventually: Eventually
) -> None:
    query = Query(served, tmp_path, subscribePattern=f"{TOPIC}.*")
    del query.source["subscribe"]
    served.broker.create_topic("refunds")
    served.send(5, "refunds")
    running = start(served.spark, **query.settings())
    try:
        served.send(20)
        eventually(lambda: lag(served) == 0, within_s=60)
        served.broker.create_topic(f"{TOPIC}-eu", queues=2)
        served.send(30, f"{TOPIC}-eu")
        eventually(lambda: len(query.numbers()) == 50, within_s=60)
        eventually(lambda: lag(served) == 0, within_s=60)
    finally:
        running.stop()
    assert query.numbers() == list(range(5, 55))

    served.broker.delete_topic(f"{TOPIC}-eu", force=True)
    served.send(10)
    with pytest.raises(StreamingQueryException, match=f"Topic {TOPIC}-eu of the checkpoint was"):
        query.run()
    query.source["failOnDataLoss"] = "false"
    query.run()

    assert query.numbers() == list(range(5, 65))


def test_a_stream_without_a_topic_is_refused_when_it_begins(served: Served, tmp_path: Path) -> None:
    query = Query(served, tmp_path, subscribe="order")
    with pytest.raises(StreamingQueryException, match=r"There is no topic order\. Is orders meant"):
        query.run()

    del query.source["subscribe"]
    query.source["subscribePattern"] = "x.*"
    with pytest.raises(StreamingQueryException, match="No topic matches the subscribePattern"):
        query.run()


def test_a_stream_begins_at_the_end_unless_it_is_told(served: Served, tmp_path: Path) -> None:
    query = Query(served, tmp_path)
    del query.source["startingOffsets"]
    served.send(30)
    query.run()
    served.send(10)

    query.run()

    assert query.numbers() == list(range(30, 40))


def test_a_stream_and_a_consumer_do_not_share_a_group(served: Served, tmp_path: Path) -> None:
    served.send(10)
    served.broker.receive(GROUP, TOPIC, limit=3)

    with pytest.raises(StreamingQueryException, match="not settled"):
        Query(served, tmp_path).run()


def test_a_stream_whose_messages_have_expired_says_so(served: Served, tmp_path: Path) -> None:
    query = Query(served, tmp_path)
    served.send(20)
    query.run()
    served.send(20)
    _expire(served)
    served.send(20)

    with pytest.raises(StreamingQueryException, match="have expired"):
        query.run()
    query.source["failOnDataLoss"] = "false"
    query.run()

    assert query.numbers() == [*range(20), *range(40, 60)]


def test_a_topic_made_again_is_another_one(served: Served, tmp_path: Path) -> None:
    query = Query(served, tmp_path)
    served.send(20)
    query.run()
    served.broker.delete_topic(TOPIC, force=True)
    served.broker.create_topic(TOPIC, type="fifo", queues=2)
    served.send(30)

    with pytest.raises(StreamingQueryException, match="created again"):
        query.run()
    query.source["failOnDataLoss"] = "false"
    query.run()

    assert query.numbers() == list(range(50))


def _expire(served: Served) -> None:
    """All that was sent before now goes."""
    served.broker.alter_topic(TOPIC, retention_ms=1_000)
    served.seal()
    served.clock.advance(3_600_000)
    assert served.broker.expire()["rows"] > 0
