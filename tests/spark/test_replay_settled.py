"""What a replay takes as settled, on a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.settings import Settings
from rmq_pipeline.spark.replay.topic_log import settled

TOPIC, GROUP = "steps", "walkers"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    settings = Settings(reserve_bytes=1 << 20)
    with Broker.open(tmp_path / "home", upkeep="none", settings=settings) as broker:
        broker.create_topic(TOPIC, type="fifo", queues=1)
        broker.create_group(GROUP, order="message_group", max_attempts=1, on_failure="park")
        broker.subscribe(GROUP, TOPIC)
        yield broker


def send(broker: Broker, *groups: str) -> None:
    columns = {"body": [b"x"] * len(groups), "message_group": list(groups)}
    broker.send(TOPIC, pa.table(columns))


def receive(broker: Broker) -> pa.Table:
    return broker.receive(GROUP, TOPIC, limit=10, invisible_duration_ms=60_000)


def settle(broker: Broker, received: pa.Table, *, batch: int, **outcomes: list[int]) -> None:
    """Settle what was received: outcome -> which rows; those not named are given back."""
    epoch = broker.open_window(f"consumer/{GROUP}", owner="test", duration_ms=60_000)["epoch"]
    rows = [(row, outcome) for outcome, which in outcomes.items() for row in which]
    said = pa.table(
        {
            "receipt_handle": received["receipt_handle"].take([row for row, _ in rows]),
            "outcome": [outcome for _, outcome in rows],
        }
    )
    broker.settle(
        GROUP,
        said,
        settle_id=f"{epoch}-{batch}",
        window=(f"consumer/{GROUP}", epoch),
        publish=None,
        sink_files=None,
        state=None,
        topic=TOPIC,
    )


def not_settled(broker: Broker) -> list[int]:
    client: Any = broker  # it has the client's verbs
    done = settled(client, GROUP, topic=TOPIC)
    return sorted(done.open["queue_offset"].to_pylist())


def test_what_is_held_behind_a_parked_message_is_not_settled(broker: Broker) -> None:
    send(broker, "a", "a", "a")
    settle(broker, receive(broker), batch=0, retry=[0])

    held = not_settled(broker)
    broker.unpark(GROUP, topic=None, message_groups=None, skip=False)
    again = receive(broker)

    assert held == [0, 1, 2]
    assert again["queue_offset"].to_pylist() == [0, 1, 2]


def test_other_message_groups_are_settled_while_one_is_parked(broker: Broker) -> None:
    send(broker, "a", "b", "a", "b")

    settle(broker, receive(broker), batch=0, retry=[0], ack=[1, 3])

    assert not_settled(broker) == [0, 2]
    held = broker.sql(
        "SELECT topic, queue_id, queue_offset, message_group FROM waiting"
    ).to_pylist()
    assert held == [{"topic": TOPIC, "queue_id": 0, "queue_offset": 2, "message_group": "a"}]


def test_what_was_settled_behind_a_message_that_is_parked_later_stays_settled(
    broker: Broker,
) -> None:
    send(broker, "a", "a", "a")
    settle(broker, receive(broker), batch=0, dead_letter=[0], ack=[1, 2])
    dead = broker.sql("SELECT queue_id, queue_offset FROM dead_letters")

    broker.redrive(GROUP, dead, redrive_id="again")
    settle(broker, receive(broker), batch=1, retry=[0])

    assert broker.sql("SELECT queue_offset FROM parked").to_pylist() == [{"queue_offset": 0}]
    assert not_settled(broker) == [0]
