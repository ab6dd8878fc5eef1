"""A look-up of waiting messages that ends late changes nothing that went on meanwhile."""

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.decide.deliver import Delivery, Receive
from rmq_pipeline.broker.decide.group_offsets import ResetOffset
from rmq_pipeline.broker.state.group_order import KNOWN_PER_GROUP
from rmq_pipeline.broker.work.receive import load_missing

MESSAGES = 5 * KNOWN_PER_GROUP
INVISIBLE_MS = 600_000


@pytest.fixture
def line(broker: Broker) -> Broker:
    """A queue of one message group; only the first of what waits behind its lease is known."""
    broker.create_topic("t", queues=1, type="fifo")
    broker.create_group("g", order="message_group")
    body = [b"%d" % number for number in range(MESSAGES)]
    broker.send("t", pa.table({"body": body, "message_group": ["a"] * MESSAGES}))
    pass_over(broker)
    return broker


def pass_over(broker: Broker) -> None:
    """Settle the first message after a receive has gone by what waits behind it."""
    first = broker.receive("g", "t", limit=1, invisible_duration_ms=INVISIBLE_MS)
    assert broker.receive("g", "t", limit=10).num_rows == 0
    broker.ack(first)


def settle(broker: Broker, n: int = KNOWN_PER_GROUP) -> list[int]:
    """The offsets of the next messages, which are settled."""
    received = broker.receive("g", "t", limit=n, invisible_duration_ms=INVISIBLE_MS)
    if received.num_rows:
        broker.ack(received)
    offsets: list[int] = received["queue_offset"].to_pylist()
    return offsets


def asked(broker: Broker) -> Delivery:
    """What a receive is told to look up, which takes its time."""
    request = Receive(
        topic="t",
        group="g",
        limit=10,
        invisible_duration_ms=INVISIBLE_MS,
        row_filter=None,
        client_id="slow",
        window=None,
        delivery=broker.engine.new_delivery(),
    )
    delivery: Delivery = broker.engine.submit(request)
    assert delivery.backlogs
    assert not len(delivery)
    return delivery


def rest(broker: Broker) -> list[int]:
    offsets: list[int] = []
    while some := settle(broker):
        offsets += some
    return offsets


def test_what_was_settled_meanwhile_does_not_come_again(line: Broker) -> None:
    first = settle(line)
    late = asked(line)
    between = settle(line) + settle(line)

    load_missing(line.engine, late, row_filter=None)

    assert first + between + rest(line) == list(range(1, MESSAGES))


def test_after_a_reset_nothing_is_skipped(line: Broker) -> None:
    settle(line), settle(line)
    late = asked(line)
    line.engine.submit(ResetOffset("g", "t", {0: 0}, False))
    pass_over(line)
    first = settle(line)

    load_missing(line.engine, late, row_filter=None)

    assert first + rest(line) == list(range(1, MESSAGES))


def test_of_two_that_look_up_the_same_one_is_enough(line: Broker) -> None:
    first = settle(line)
    one, other = asked(line), asked(line)

    for late in (one, other):
        load_missing(line.engine, late, row_filter=None)

    assert first + rest(line) == list(range(1, MESSAGES))
