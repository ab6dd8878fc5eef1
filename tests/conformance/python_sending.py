"""Scenarios of producers: what they send, and that it arrives as it was sent."""

import threading
import time
from collections.abc import Callable
from typing import Any

from rocketmq import (
    ClientConfiguration,
    Credentials,
    FilterExpression,
    Message,
    Producer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)

from tests.conformance.python_client import (
    PATIENCE_S,
    Facts,
    Place,
    message,
    refused,
    started,
    take,
    told,
)


def normal(place: Place) -> Facts:
    """Tag, keys and properties come as they went; an acknowledged message does not come again."""
    topic = place.topic("normal")
    consumer = place.consumer(topic, f"{topic}-group", wait_s=1)
    with started(place.producer(topic)) as producer, started(consumer):
        sent = [
            producer.send(
                message(topic, f"n{i}", tag="t", keys=f"k{i}", properties={"p": str(i)})
            ).message_id
            for i in range(5)
        ]
        got = take(consumer, 5)
        return {"sent": sent, "got": got, "again": len(consumer.receive(32, 10))}


def fifo(place: Place) -> Facts:
    """Each message group comes in the order it was sent in."""
    topic = place.topic("fifo")
    consumer = place.consumer(topic, f"{topic}-group", wait_s=2)
    with started(place.producer(topic)) as producer, started(consumer):
        for i in range(6):
            producer.send(message(topic, f"{i // 2}", message_group=f"g{i % 2}"))
        return {"got": take(consumer, 6)}


def delay(place: Place) -> Facts:
    """A message with a delivery time does not come before it."""
    topic = place.topic("delay")
    with (
        started(place.producer(topic)) as producer,
        started(place.consumer(topic, f"{topic}-group", wait_s=10)) as consumer,
    ):
        due_s = int(time.time()) + 3
        producer.send(message(topic, "later", delivery_timestamp=due_s))
        return {"due_ms": due_s * 1000, "got": take(consumer, 1)}


def recall(place: Place) -> Facts:
    """A recalled message does not come; one after it, not recalled, does."""
    topic = place.topic("recall")
    with (
        started(place.producer(topic)) as producer,
        started(place.consumer(topic, f"{topic}-group", wait_s=10)) as consumer,
    ):
        # Late enough that it is called back before, beside all the other scenarios.
        due_s = int(time.time()) + 8
        called_back = producer.send(message(topic, "no", delivery_timestamp=due_s))
        kept = producer.send(message(topic, "yes", delivery_timestamp=due_s + 1))
        recalled = producer.recall_message(topic, called_back.recall_handle)
        got = take(consumer, 1)
        late = refused(lambda: producer.recall_message(topic, kept.recall_handle))
        return {"id": called_back.message_id, "recalled": recalled, "got": got, "late": late}


def priority(place: Place) -> Facts:
    """The higher one comes first."""
    topic = place.topic("priority")
    with (
        started(place.producer(topic)) as producer,
        started(place.consumer(topic, f"{topic}-group")) as consumer,
    ):
        for level in (1, 9, 5):
            producer.send(message(topic, f"{level}", priority=level))
        return {"got": take(consumer, 3)}


class Answers(TransactionChecker):  # type: ignore[misc]
    """Commits what says so in its body, once it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answered = threading.Event()

    def check(self, message: Message) -> TransactionResolution:
        self.asked.append(message.body.decode())
        self.answered.set()
        commit = message.body.endswith(b"commit")
        return TransactionResolution.COMMIT if commit else TransactionResolution.ROLLBACK


def transaction(place: Place) -> Facts:
    """Committed halves come, rolled back ones do not; an orphan is asked about."""
    topic = place.topic("transaction")
    answers = Answers()
    producer = place.producer(topic, checker=answers)
    with started(producer), started(place.consumer(topic, f"{topic}-group", wait_s=2)) as consumer:
        for body, end in (("orphan commit", None), ("a", "commit"), ("b", "rollback")):
            half = producer.begin_transaction()
            producer.send(message(topic, body), half)
            if end is not None:
                getattr(half, end)()
        first = take(consumer, 1)
        answers.answered.wait(PATIENCE_S * 2)
        return {"got": first, "asked": answers.asked, "orphan": take(consumer, 1)}


def send_async(place: Place) -> Facts:
    """Sends that do not wait for each other are all answered."""
    topic = place.topic("send-async")
    with (
        started(place.producer(topic)) as producer,
        started(place.consumer(topic, f"{topic}-group")) as consumer,
    ):
        futures = [producer.send_async(message(topic, f"{i}")) for i in range(100)]
        sent = [future.result(PATIENCE_S).message_id for future in futures]
        return {"sent": sent, "got": take(consumer, 100)}


def refusals(place: Place) -> Facts:
    """What the client says of a topic of another type and of one that is not there."""
    topic = place.topic("fifo")
    missing = place.topic("missing")
    with started(place.producer(topic)) as producer:
        return {
            "wrong_type": refused(lambda: producer.send(message(topic, "x"))),
            "missing": refused(lambda: producer.send(message(missing, "x"))),
            "receipt": refused(lambda: _acknowledge_nothing(place)),
        }


def _acknowledge_nothing(place: Place) -> None:
    topic = place.topic("receipts")
    with (
        started(place.producer(topic)) as producer,
        started(place.consumer(topic, f"{topic}-group")) as consumer,
    ):
        producer.send(message(topic, "once"))
        for got in consumer.receive(1, 10):
            consumer.ack(got)
            consumer.ack(got)


def namespaces(place: Place) -> Facts:
    """The same names in two namespaces are two topics and two groups."""
    topic = place.topic("shared-name")
    got: Facts = {}
    for namespace in ("north", "south"):
        configuration = place.configuration(namespace=namespace)
        subscription = {topic: FilterExpression()}
        consumer = SimpleConsumer(configuration, "readers", subscription, await_duration=1)
        with started(Producer(configuration, (topic,))) as producer, started(consumer):
            producer.send(message(topic, namespace))
            got[namespace] = take(consumer, 1)
            got[f"{namespace} again"] = [told(each) for each in consumer.receive(32, 10)]
    return got


def over_tls(place: Place) -> Facts:
    """Send and receive through the other port; the plain one does not understand."""
    topic = place.topic("tls")
    configuration = ClientConfiguration(place.tls_endpoints, Credentials())
    producer = Producer(configuration, (topic,), tls_enable=True)
    consumer = SimpleConsumer(
        configuration,
        f"{topic}-group",
        {topic: FilterExpression()},
        await_duration=5,
        tls_enable=True,
    )
    with started(producer), started(consumer):
        sent = producer.send(message(topic, "sealed")).message_id
        return {"sent": [sent], "got": take(consumer, 1)}


def access(place: Place) -> Facts:
    """Who may, may; a bad secret, a policy that denies and no name at all are told apart."""
    topic = place.topic("access")

    def attempt(user: str, secret: str, to: str) -> str:
        configuration = ClientConfiguration(place.secured_endpoints, Credentials(user, secret))
        producer = Producer(configuration, (to,))
        return refused(lambda: _send_once(producer, to))

    good = place.users["writer"]
    return {
        "good": attempt("writer", good, topic),
        "bad": attempt("writer", "wrong", topic),
        "unknown": attempt("nobody", good, topic),
        "anonymous": attempt("", "", topic),
        "denied": attempt("writer", good, place.topic("forbidden")),
    }


def _send_once(producer: Any, topic: str) -> None:
    with started(producer):
        producer.send(message(topic, "x"))


SCENARIOS: dict[str, Callable[[Place], Facts]] = {
    "normal": normal,
    "fifo": fifo,
    "delay": delay,
    "recall": recall,
    "priority": priority,
    "transaction": transaction,
    "send_async": send_async,
    "refusals": refusals,
    "namespaces": namespaces,
    "over_tls": over_tls,
    "access": access,
}
