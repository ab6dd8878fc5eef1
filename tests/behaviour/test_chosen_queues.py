"""A producer may choose the queue of a message, as RocketMQ's MessageQueueSelector does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


def queues_of(endpoint: Endpoint, name: str) -> list[list[bytes]]:
    """The bodies of each queue, in the order of its offsets."""
    return [
        endpoint.broker.read(name, queue_id, offset=0, limit=max(end, 1))["body"].to_pylist()
        for queue_id, end in enumerate(endpoint.max_offsets(name))
    ]


@pytest.mark.parametrize("type", ["normal", "mixed"])
@pytest.mark.parametrize("n", [1, 4, 400])
def test_messages_go_to_the_queues_that_the_producer_chose(
    endpoint: Endpoint, topic: Make, messages: Make, type: str, n: int
) -> None:
    name = topic(type=type, queues=4)

    chosen = [(3 * i + 1) % 4 for i in range(n)]
    sent = endpoint.broker.send(name, messages(n, queue_id=chosen))

    assert sent["queue_id"].to_pylist() == chosen
    expected = [[str(i).encode() for i in range(n) if chosen[i] == q] for q in range(4)]
    assert queues_of(endpoint, name) == expected


@pytest.mark.parametrize("n", [6, 600])
def test_what_says_no_queue_is_spread_by_the_broker(
    endpoint: Endpoint, topic: Make, messages: Make, n: int
) -> None:
    name = topic(queues=3)

    sent = endpoint.broker.send(name, messages(n, queue_id=[2, None] * (n // 2)))

    given = sent["queue_id"].to_pylist()
    assert given[::2] == [2] * (n // 2)
    assert set(given[1::2]) == {0, 1, 2}


def test_on_a_mixed_topic_a_message_group_or_the_producer_chooses(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(type="mixed", queues=4)
    first = endpoint.broker.send(name, messages(1, groups=["a"]))["queue_id"][0].as_py()

    table = messages(3, queue_id=[3, None, None], message_group=[None, "a", None])
    sent = endpoint.broker.send(name, table)["queue_id"].to_pylist()

    assert sent[:2] == [3, first]


def test_who_keeps_an_order_by_choosing_queues_is_given_it_by_queue(
    endpoint: Endpoint, topic: Make, group: Make
) -> None:
    name, readers = topic(queues=4), group(order="queue")
    orders = [f"{step}-{order}" for step in range(5) for order in range(12)]
    for body in orders:
        queue_id = int(body.split("-")[1]) % 4
        endpoint.broker.send(name, pa.table({"body": [body.encode()], "queue_id": [queue_id]}))

    mine: dict[str, Any] = {"client_id": "mine", "queue_ids": [0, 1]}
    endpoint.broker.lock_queues(readers, name, **mine)
    seen: list[str] = []
    for how in (mine, {"client_id": "other"}):
        while (got := endpoint.broker.receive(readers, name, limit=5, **how)).num_rows:
            endpoint.broker.ack(got)
            seen += [body.decode() for body in got["body"].to_pylist()]

    assert sorted(seen) == sorted(orders)
    for order in range(12):
        steps = [body for body in seen if body.endswith(f"-{order}")]
        assert steps == sorted(steps)
    assert {int(body.split("-")[1]) % 4 for body in seen[:30]} == {0, 1}


@pytest.mark.parametrize("queue_id", [4, -1, 2**31 - 1])
def test_a_queue_that_the_topic_has_not_is_refused(
    endpoint: Endpoint, topic: Make, messages: Make, queue_id: int
) -> None:
    name = topic(queues=4)

    with pytest.raises(errors.IllegalQueueError, match=f"Row 1: .* has no queue {queue_id}"):
        endpoint.broker.send(name, messages(3, queue_id=[0, queue_id, None]))

    assert endpoint.stored(name) == 0


@pytest.mark.parametrize(
    ("type", "columns", "why"),
    [
        ("fifo", {"groups": ["a"]}, "its message_group chooses the queue"),
        ("lite", {"lite_topic": "a"}, "its lite_topic chooses the queue"),
        ("priority", {"priority": 1}, "its priority chooses the queue"),
        ("delay", {"delay_level": 1}, "the broker chooses the queue when it is delivered"),
        ("mixed", {"delay_level": 1}, "the broker chooses the queue when it is delivered"),
        ("mixed", {"groups": ["a"]}, "its message_group chooses the queue"),
    ],
)
def test_where_something_else_chooses_the_queue_the_producer_cannot(
    endpoint: Endpoint, topic: Make, messages: Make, type: str, columns: dict[str, object], why: str
) -> None:
    name = topic(type=type, queues=4)

    with pytest.raises(errors.MessageTypeError, match=f"Row 0: it has a queue_id, but {why}"):
        endpoint.broker.send(name, messages(1, queue_id=0, **columns))

    assert endpoint.stored(name) == 0


@pytest.mark.parametrize("type", ["transaction", "mixed"])
def test_a_half_message_has_no_queue_yet(
    endpoint: Endpoint, topic: Make, messages: Make, type: str
) -> None:
    name = topic(type=type, queues=4)

    with pytest.raises(errors.MessageTypeError, match="chooses the queue when it is committed"):
        endpoint.broker.send_half(name, messages(1, queue_id=0), producer_group="p")


def test_a_chosen_queue_stays_when_the_topic_grows(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(queues=2)
    endpoint.broker.send(name, messages(2, queue_id=[0, 1]))
    endpoint.broker.alter_topic(name, queues=4)

    sent = endpoint.broker.send(name, messages(4, start=2, queue_id=[1, 3, 1, 0]))

    assert sent["queue_id"].to_pylist() == [1, 3, 1, 0]
    assert queues_of(endpoint, name) == [[b"0", b"5"], [b"1", b"2", b"4"], [], [b"3"]]
