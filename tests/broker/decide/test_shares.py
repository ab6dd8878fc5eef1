"""How a receive shares its messages among the queues."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide.deliver import Delivery, Receive

QUEUES = 8


@pytest.fixture
def broker(home: Path) -> Iterator[Broker]:
    with Broker.open(home, upkeep="none") as broker:
        yield broker


def decided(broker: Broker, *, limit: int, client_id: str = "a", delivery: int = 1) -> Delivery:
    """What a receive would lease now."""
    request = Receive(
        topic="t",
        group="g",
        limit=limit,
        invisible_duration_ms=30_000,
        row_filter=None,
        client_id=client_id,
        window=None,
        delivery=delivery,
    )
    engine = broker.engine
    answer: Delivery = request.decide(engine.state, engine.clock.now_ms()).answer
    return answer


def test_queues_with_nothing_to_take_get_no_share(broker: Broker) -> None:
    broker.create_topic("t", type="lite", queues=QUEUES)
    broker.create_group("g")
    for client, lite_topic in (("a", "x"), ("b", "y")):
        broker.sync_lite_subscription(
            "g", "t", client_id=client, action="add", lite_topics=[lite_topic]
        )
    messages = pa.table({"body": [b"."] * 1000, "lite_topic": ["x", "y"] * 500})
    broker.send("t", messages)
    # The receive of the other client passes the messages of the first one, which wait from then on.
    broker.ack(broker.receive("g", "t", client_id="b", limit=500))

    assert len(decided(broker, limit=400)) == 400


def test_open_queues_beside_blocked_ones_get_equal_turns(broker: Broker) -> None:
    broker.create_topic("t", type="fifo", queues=QUEUES)
    broker.create_group("g", order="queue")
    for first in range(0, 800, QUEUES):
        groups = [f"group-{n}" for n in range(first, first + QUEUES)]
        broker.send("t", pa.table({"body": [b"."] * QUEUES, "message_group": groups}))
    for queue in range(QUEUES - 2):
        assert len(broker.receive("g", "t", limit=1, queue_ids=[queue])) == 1
    dice = random.Random(1)

    answers = [decided(broker, limit=1, delivery=dice.getrandbits(62)) for _ in range(400)]

    turns = Counter(queue for answer in answers for queue, _ in answer.taken)
    assert turns.keys() == {QUEUES - 2, QUEUES - 1}
    assert min(turns.values()) > 400 / 3
