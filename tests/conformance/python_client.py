"""What the official Python client sees of a broker, told as JSON.

Tests run it in a process of its own, since the client and the broker would share stubs, threads
and a home directory otherwise. It is given one JSON object (where to connect, what to try), tries
all of it at once, and prints one JSON object: what each scenario saw, or the error that ended it.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
)

Facts = dict[str, Any]

#: The least the endpoint gives a SimpleConsumer.
INVISIBLE_S = 10
#: How long a scenario waits for what should come within milliseconds.
PATIENCE_S = 25.0


@dataclass(frozen=True)
class Place:
    """Where a scenario connects, and what its topics and groups are called."""

    endpoints: str
    prefix: str
    tls_endpoints: str = ""
    secured_endpoints: str = ""
    users: dict[str, str] = field(default_factory=dict)

    def topic(self, scenario: str) -> str:
        return f"{self.prefix}-{scenario}"

    def configuration(self, *, namespace: str = "") -> ClientConfiguration:
        return ClientConfiguration(self.endpoints, Credentials(), namespace)

    def producer(self, *topics: str, **options: Any) -> Any:
        return Producer(self.configuration(), topics, **options)

    def consumer(self, topic: str, group: str, *, wait_s: int = 5) -> Any:
        return SimpleConsumer(
            self.configuration(), group, {topic: FilterExpression()}, await_duration=wait_s
        )


@contextmanager
def started(*clients: Any) -> Iterator[Any]:
    """The first of them; all are started, and shut down afterwards."""
    running = []
    try:
        for client in clients:
            client.startup()
            running.append(client)
        yield clients[0]
    finally:
        for client in reversed(running):
            client.shutdown()


def message(topic: str, body: str, **settings: Any) -> Message:
    """A message; settings are attributes of the client's own class, and ``properties``."""
    made = Message()
    made.topic = topic
    made.body = body.encode()
    for name, value in settings.pop("properties", {}).items():
        made.add_property(name, value)
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def told(got: Message) -> Facts:
    """A message that came, as JSON."""
    return {
        "body": got.body.decode(),
        "topic": got.topic,
        "tag": got.tag,
        "keys": sorted(got.keys),
        "properties": dict(got.properties),
        "group": got.message_group,
        "lite_topic": got.lite_topic,
        "priority": got.priority,
        "attempt": got.delivery_attempt,
        "id": got.message_id,
        "corrupted": got.corrupted,
        "at_ms": time.time_ns() // 1_000_000,
    }


def take(consumer: Any, n: int, *, patience_s: float = PATIENCE_S) -> list[Facts]:
    """Receive and acknowledge until ``n`` have come."""
    found: list[Facts] = []
    give_up_at = time.monotonic() + patience_s
    while len(found) < n and time.monotonic() < give_up_at:
        for got in consumer.receive(32, INVISIBLE_S):
            found.append(told(got))
            consumer.ack(got)
    return found


def refused(call: Callable[[], Any]) -> str:
    """The class of the error that a call ends with; empty when there is none."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever the client raises is the fact
        return type(error).__name__
    return ""


class Heard(MessageListener):  # type: ignore[misc]
    """A listener that remembers, and fails the bodies it is told to, so many times each."""

    def __init__(self, fail: dict[str, int] | None = None) -> None:
        self.messages: list[Facts] = []
        self._fail = dict(fail or {})
        self._changed = threading.Condition()

    def consume(self, message: Message) -> ConsumeResult:
        facts = told(message)
        with self._changed:
            self.messages.append(facts)
            left = self._fail.get(facts["body"], 0)
            self._fail[facts["body"]] = left - 1
            self._changed.notify_all()
        return ConsumeResult.FAILURE if left > 0 else ConsumeResult.SUCCESS

    def wait(self, n: int, *, patience_s: float = PATIENCE_S) -> list[Facts]:
        """Return the received messages, once there are ``n`` or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.messages) >= n, patience_s)
            return list(self.messages)


def push(place: Place, topic: str, group: str, listener: Heard) -> Any:
    """A consumer that calls the listener."""
    subscription = {topic: FilterExpression()}
    return PushConsumer(place.configuration(), group, listener, subscription)


def run(scenarios: dict[str, Callable[[Place], Facts]], told_to: Facts) -> Facts:
    """Try scenarios at once; what each saw, by name."""
    wanted = told_to["scenarios"]
    place = Place(**told_to["place"])

    def attempt(name: str) -> Facts:
        try:
            return scenarios[name](place)
        except Exception as error:  # noqa: BLE001 - the test that asks for the scenario fails
            return {"error": f"{type(error).__name__}: {error}"}

    with ThreadPoolExecutor(len(wanted)) as pool:
        return dict(zip(wanted, pool.map(attempt, wanted), strict=True))


def main() -> None:
    """Read what to do from the first argument; print what was seen."""
    from tests.conformance import python_consuming, python_sending

    scenarios = python_sending.SCENARIOS | python_consuming.SCENARIOS
    sys.stdout.write(json.dumps(run(scenarios, json.loads(sys.argv[1]))) + "\n")


if __name__ == "__main__":
    main()
