"""Bells: who is told that something may be visible."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.waiting import Changes
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.settings import Settings
from tests.waiting import until


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    small = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)
    with Broker.open(
        tmp_path / "home", clock=ManualClock(), upkeep="none", settings=small
    ) as broker:
        yield broker


def test_messages_are_for_all_groups_and_what_one_does_for_itself(broker: Broker) -> None:
    told: list[Changes] = []
    topic = broker.create_topic("orders", type="fifo", queues=1)["topic_id"]
    group = broker.create_group("ordered", order="message_group")["group_id"]
    end = broker.engine.wakeups.listen(told.append)

    broker.send("orders", pa.table({"body": [b"1"], "message_group": ["A"]}))
    until(lambda: told == [{topic: None}])
    broker.ack(broker.receive("ordered", "orders"))
    until(lambda: told == [{topic: None}, {topic: {group}}])
    end()
    broker.send("orders", pa.table({"body": [b"2"], "message_group": ["A"]}))
    broker.receive("ordered", "orders")

    assert len(told) == 2


def test_an_ack_without_order_opens_the_way_for_nobody(broker: Broker) -> None:
    told: list[Changes] = []
    topic = broker.create_topic("t", queues=1)["topic_id"]
    group = broker.create_group("g")["group_id"]
    before = broker.engine.wakeups.version(topic)
    broker.send("t", pa.table({"body": [b"1", b"2"]}))
    received = broker.receive("g", "t")
    until(lambda: broker.engine.wakeups.version(topic) == before + 1)
    broker.engine.wakeups.listen(told.append)

    broker.ack(received["receipt_handle"].to_pylist()[:1])
    broker.change_invisible_duration(received["receipt_handle"].to_pylist()[1:], 1)

    until(lambda: told)
    assert told == [{topic: {group}}]


def test_at_the_end_everybody_is_told(broker: Broker) -> None:
    told: list[Changes] = []
    broker.engine.wakeups.listen(told.append)

    broker.close()

    assert told[-1] == {}
