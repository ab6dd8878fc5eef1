"""Scenarios of consumers: filters, invisible time, push, order, dead letters, lite topics."""

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
        consumer.change_invisible_duration(first, 1)
        changed = told(first)
        renewed, first.receipt_handle = first.receipt_handle, before
        return {
            "changed": changed,
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


def push_fifo(place: Place) -> Facts:
    """A failing message holds up its own group only, and goes to the dead letters at last."""
    topic = place.topic("push-fifo")
    heard = Heard(fail={"h1": 99})
    with (
        started(place.producer(topic)) as producer,
        started(push(place, topic, f"{topic}-group", heard)),
    ):
        for i in range(4):
            for group in ("g", "h"):
                producer.send(message(topic, f"{group}{i}", message_group=group))
        return {"got": heard.wait(10)}


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
    "lite": lite,
    "receive_async": receive_async,
}
