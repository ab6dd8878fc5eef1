"""A consumer with an idempotency key: what its handler sees, and what its acks remember."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.handling import sink
from rmq_pipeline.settings import Settings
from rmq_pipeline.spark.consumer import ConsumerSpec, WindowReport, run_window
from tests.spark.handlers import SINK, once

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

TOPIC, GROUP = "payments", "charges"
Run = Callable[[], WindowReport]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    settings = Settings(reserve_bytes=1024 * 1024)
    with Broker.open(tmp_path / "home", upkeep="none", settings=settings) as broker:
        broker.create_topic(TOPIC, queues=2)
        broker.create_group(GROUP, max_attempts=2, backoff_ms=[1])
        yield broker


@pytest.fixture
def run(broker: Broker, spark: SparkSession, tmp_path: Path) -> Run:
    """One window of the consumer, whose key is the property ``payment``."""
    spec = ConsumerSpec(
        name="charges",
        topic=TOPIC,
        group=GROUP,
        handler=once,
        sink=tmp_path / "sink",
        sink_schema=SINK,
        idempotency_key="payment",
    )
    return lambda: run_window(spec, broker, spark=lambda: spark, owner="test", idle_s=0.3)


def send(broker: Broker, **payments: str) -> None:
    """Messages of these bodies, each with its key; a body of ``bad…`` cannot be handled."""
    rows = {
        "body": [body.encode() for body in payments],
        "born_at_ms": [0] * len(payments),
        "properties": pa.array(
            [[("payment", key)] for key in payments.values()], schema.PROPERTIES
        ),
    }
    broker.send(TOPIC, pa.table(rows))


def charged(folder: Path) -> list[str]:
    """The bodies whose effect is in the sink."""
    return sorted(body.decode() for body in sink.read_sink(folder / "sink")["body"].to_pylist())


def test_a_handler_sees_what_was_handled_before(broker: Broker, run: Run, tmp_path: Path) -> None:
    send(broker, a="1", b="2")
    run()
    send(broker, again="1", c="3")

    report = run()

    assert report.acked == 2
    assert charged(tmp_path) == ["a", "b", "c"]


def test_of_two_messages_with_one_key_in_a_batch_one_has_the_effect(
    broker: Broker, run: Run, tmp_path: Path
) -> None:
    send(broker, a="1", again="1", b="2")

    assert run().acked == 3

    assert len(charged(tmp_path)) == 2
    keys = pa.table([["1", "2"]], schema=schema.IDEMPOTENCY_KEY)
    assert broker.seen_before(GROUP, keys)["seen_at_ms"].null_count == 0


def test_what_failed_is_not_seen_when_it_comes_again(
    broker: Broker, run: Run, tmp_path: Path
) -> None:
    send(broker, bad="1")
    report = run()
    send(broker, good="1")

    run()

    assert report.dead_lettered == 1
    assert charged(tmp_path) == ["good"]
