"""Scenarios of consumers: filters, invisible time, push, order, dead letters, lite topics."""

import time
from collections.abc import Callable
from typing import Any

from rocketmq import FilterExpression, LitePushConsumer, LiteSimpleConsumer, SimpleConsumer
from rocketmq.grpc_protocol import FilterType

from tests.conformance.python_client import (
    PATIENCE_S,
    Facts,
    Heard,
    Place,
    message,
    push,
    refused,
    started,
    take,
    told,
)


def filters(place: Place) -> Facts:
    """A tag expression and a condition on properties each choose their own."""
    topic = place.topic("filters")

    def chosen(group: str, expression: FilterExpression, n: int) -> list[Facts]:
        subscription = {topic: expression}
        consumer = SimpleConsumer(
            place.configuration(), f"{topic}-{group}", subscription, await_duration=1
        )
        with started(consumer):
            return take(consumer, n) + [told(got) for got in consumer.receive(32, 10)]

    with started(place.producer(topic)) as producer:
        for tag, size in (("a", "1"), ("b", "5"), ("c", "9")):
            producer.send(message(topic, f"{tag}{size}", tag=tag, properties={"size": size}))
    return {
        "tags": chosen("tags", FilterExpression("a || b"), 2),
        "sql": chosen("sql", FilterExpression("size > 3 AND TAGS <> 'b'", FilterType.SQL), 1),
    }


def invisible(place: Place) -> Facts:
    """A changed invisible time ends when it says; the receipt before the change is void."""
    topic = place.topic("invisible")
    with (
        started(place.producer(topic)) as producer,
        started(place.consumer(topic, f"{topic}-group")) as consumer,
    ):
        producer.send(message(topic, "x"))
        (first,) = consumer.receive(1, 30)
        before = first.receipt_handle
        asked_ms = time.time_ns() // 1_000_000
        consumer.change_invisible_duration(first, 1)
        renewed, first.receipt_handle = first.receipt_handle, before
        return {
            "asked_ms": asked_ms,
            "new_handle": before != renewed,
            "old_handle": refused(lambda: consumer.ack(first)),
            "got": take(consumer, 1),
        }


def push_concurrent(place: Place) -> Facts:
    """Every message is heard; one whose listener fails is heard again, one attempt later."""
    topic = place.topic("push")
    heard = Heard(fail={"p3": 1})
    with (
        started(place.producer(topic)) as producer,
        started(push(place, topic, f"{topic}-group", heard)),
    ):
        for i in range(40):
            producer.send(message(topic, f"p{i}", tag="t", keys="k", properties={"p": "q"}))
        return {"got": heard.wait(41)}


def _poisoned(place: Place, name: str, *, poison: str) -> Facts:
    """Two message groups in turns, of which one message fails every time."""
    topic = place.topic(name)
    heard = Heard(fail={poison: 99})
    with (
        started(place.producer(topic)) as producer,
        started(push(place, topic, f"{topic}-group", heard)),
    ):
        for i in range(4):
            for group in ("g", "h"):
                producer.send(message(topic, f"{group}{i}", message_group=group))
        return {"got": heard.wait(10)}


def push_fifo(place: Place) -> Facts:
    """A failing message holds up its own group only, and goes to the dead letters at last."""
    return _poisoned(place, "push-fifo", poison="h1")


def push_queue(place: Place) -> Facts:
    """With order by queue a listener hears a queue in order, and a failing message ends."""
    return _poisoned(place, "push-queue", poison="g1")


def queue_order(place: Place) -> Facts:
    """A batch blocks its queue, whatever the message groups, until all of it is acknowledged."""
    topic = place.topic("queue-order")
    with (
        started(place.producer(topic)) as producer,
        started(place.consumer(topic, f"{topic}-group")) as one,
        started(place.consumer(topic, f"{topic}-group", wait_s=1)) as other,
    ):
        for i in range(4):
            producer.send(message(topic, f"q{i}", message_group=f"g{i}"))
        batch = one.receive(2, 30)
        blocked = [told(got) for got in other.receive(32, 30) or []]
        for got in reversed(batch):
            one.ack(got)
        return {"batch": [told(got) for got in batch], "blocked": blocked, "got": take(other, 2)}


def lite(place: Place) -> Facts:
    """Lite consumers get the lite topics they have asked for, and no others."""
    topic = place.topic("lite")
    heard = Heard()
    pushed = LitePushConsumer(place.configuration(), f"{topic}-push", topic, heard)
    simple = LiteSimpleConsumer(topic, place.configuration(), f"{topic}-simple", await_duration=2)
    with started(place.producer(topic)) as producer, started(pushed), started(simple):
        for consumer, name in ((pushed, "room-1"), (simple, "room-2")):
            consumer.subscribe_lite(name)
            consumer.subscribe_lite_all()
        for i in range(6):
            producer.send(message(topic, f"{i}", lite_topic=f"room-{i % 3}"))
        simple_got = take(simple, 2)
        got = heard.wait(2)
        pushed.unsubscribe_lite("room-1")
        return {"push": got, "simple": simple_got}


def receive_async(place: Place) -> Facts:
    """A receive that waits in the background gets what is sent meanwhile."""
    topic = place.topic("receive-async")
    with (
        started(place.producer(topic)) as producer,
        started(place.consumer(topic, f"{topic}-group", wait_s=10)) as consumer,
    ):
        waiting = consumer.receive_async(1, 10)
        producer.send(message(topic, "x"))
        got: list[Any] = waiting.result(PATIENCE_S)
        return {"got": [told(each) for each in got], "acked": refused(lambda: consumer.ack(got[0]))}


SCENARIOS: dict[str, Callable[[Place], Facts]] = {
    "filters": filters,
    "invisible": invisible,
    "push_concurrent": push_concurrent,
    "push_fifo": push_fifo,
    "push_queue": push_queue,
    "queue_order": queue_order,
    "lite": lite,
    "receive_async": receive_async,
}
