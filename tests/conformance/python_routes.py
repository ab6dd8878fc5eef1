"""The official Python client with a topic at three brokers, of which one stops and comes back.

Told where to connect, it prints a line after each phase and goes on when it reads one. The last
line says what was sent and heard, and what the client could not do.
"""

import json
import sys
import time
from functools import partial
from typing import Any

from rocketmq import (
    ClientConfiguration,
    Credentials,
    LiteSimpleConsumer,
    Message,
    Producer,
    TransactionChecker,
    TransactionResolution,
)

from tests.conformance.python_client import Facts, Heard, Place, message, push, refused, started

GROUPS = 30
ROUNDS = 10
#: The same while a broker is away: each refused send takes seconds.
ROUNDS_WITHOUT = 2
PATIENCE_S = 75.0
QUOTA = "LiteSubscriptionQuotaExceededException"


def port(endpoints: Any) -> int:
    """Which broker it is: its port."""
    return int(str(endpoints).rpartition(":")[2])


class Never(TransactionChecker):  # type: ignore[misc]
    """A checker that is not asked, as all halves are ended."""

    def check(self, message: Message) -> TransactionResolution:
        raise AssertionError(message)


def next_phase(what: str) -> None:
    """Say that a phase is over, and wait for the next one."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()
    sys.stdin.readline()


def send_ordered(
    producer: Any, topic: str, first: int, *, rounds: int = ROUNDS, patience_s: float = 0.0
) -> dict[str, list[str]]:
    """Send to each message group in turn; the bodies that were answered, by group."""
    sent: dict[str, list[str]] = {f"g{group}": [] for group in range(GROUPS)}
    give_up_at = time.monotonic() + patience_s
    for number in range(first, first + rounds):
        for group, bodies in sent.items():
            send = partial(producer.send, message(topic, f"{group}-{number}", message_group=group))
            refusal = refused(send)
            while refusal and time.monotonic() < give_up_at:
                refusal = refused(send)
            if not refusal:
                bodies.append(f"{group}-{number}")
    return sent


def send_plain(producer: Any, topic: str, prefix: str, n: int) -> Facts:
    """Send without message groups: the ports of the answers, and the bodies that were answered."""
    ports, bodies = [], []
    for number in range(n):
        body = f"{prefix}{number}"
        try:
            receipt = producer.send(message(topic, body))
        except Exception:  # noqa: BLE001 - that sends fail is a fact
            continue
        ports.append(port(receipt.message_queue.endpoints))
        bodies.append(body)
    return {"ports": ports, "bodies": bodies}


def transactions(place: Place, topic: str, heard: Heard) -> Facts:
    """Commit six halves; the ports that they went to, and what came."""
    ports = set()
    with started(Producer(place.configuration(), (topic,), Never())) as producer:
        for number in range(6):
            transaction = producer.begin_transaction()
            receipt = producer.send(message(topic, f"half {number}"), transaction)
            ports.add(port(receipt.message_queue.endpoints))
            transaction.commit()
        return {"ports": sorted(ports), "heard": [each["body"] for each in heard.wait(6)]}


def recalls(place: Place, topic: str) -> Facts:
    """Recall a scheduled message of each broker; the errors, by port."""
    found: Facts = {}
    with started(place.producer(topic)) as producer:
        while len(found) < 3:
            due_s = int(time.time()) + 600
            receipt = producer.send(message(topic, "x", delivery_timestamp=due_s))
            recall = partial(producer.recall_message, topic, receipt.recall_handle)
            found[str(port(receipt.message_queue.endpoints))] = refused(recall)
    return found


def lite(topic: str, endpoints: str) -> list[str]:
    """What a consumer of a lite topic gets that dials an address, or its refusal."""
    where = ClientConfiguration(endpoints, Credentials())
    consumer = LiteSimpleConsumer(topic, where, f"{topic}-group", await_duration=1)
    found: list[str] = []
    with started(Producer(where, (topic,))) as producer, started(consumer):
        refusal = QUOTA
        give_up_at = time.monotonic() + PATIENCE_S
        # Its quota is 0 until its settings have come.
        while refusal == QUOTA and time.monotonic() < give_up_at:
            refusal = refused(partial(consumer.subscribe_lite, "one"))
        if refusal:
            return [refusal]
        consumer.subscribe_lite_all()
        producer.send(message(topic, endpoints, lite_topic="one"))
        for _ in range(5):
            for got in consumer.receive(32, 10):
                found.append(got.body.decode())
                consumer.ack(got)
    return found


def main() -> None:
    told = json.loads(sys.argv[1])
    place = Place(**told["place"])
    topic, fifo, half = (place.topic(name) for name in ("routed", "routed-fifo", "routed-half"))
    heard = {name: Heard() for name in (topic, fifo, half)}
    facts: Facts = {}
    consumers = [push(place, name, f"{name}-group", log) for name, log in heard.items()]
    with started(*consumers), started(place.producer(topic, fifo)) as producer:
        facts["ordered"] = [send_ordered(producer, fifo, 0)]
        facts["plain"] = [send_plain(producer, topic, "first ", 30)]
        heard[fifo].wait(GROUPS * ROUNDS, patience_s=PATIENCE_S)
        facts["order"] = [each["body"] for each in heard[fifo].messages]
        facts["transactions"] = transactions(place, half, heard[half])
        facts["recalls"] = recalls(place, place.topic("routed-delay"))
        lite_topic = place.topic("routed-lite")
        facts["lite"] = {each: lite(lite_topic, each) for each in told["lite_endpoints"]}
        next_phase("all brokers")
        facts["ordered"].append(send_ordered(producer, fifo, 10, rounds=ROUNDS_WITHOUT))
        facts["plain"].append(send_plain(producer, topic, "second ", 30))
        next_phase("without one")
        # The client connects again to the broker that is back after some seconds.
        last = send_ordered(producer, fifo, 20, patience_s=PATIENCE_S)
        facts["ordered"].append(last)
        facts["plain"].append(send_plain(producer, topic, "third ", 30))
        for name, sent in ((topic, "plain"), (fifo, "ordered")):
            heard[name].wait(count(facts[sent]), patience_s=PATIENCE_S)
    facts["heard"] = {name: [each["body"] for each in log.messages] for name, log in heard.items()}
    sys.stdout.write(json.dumps(facts) + "\n")


def count(rounds: list[Facts]) -> int:
    """How many messages were answered."""
    return sum(
        len(sent["bodies"]) if "bodies" in sent else sum(map(len, sent.values())) for sent in rounds
    )


if __name__ == "__main__":
    main()
