"""A listener that remembers, and a consumer that calls it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.push_consumer import PushConsumer
from rmq_pipeline.consumer.received_message import ReceivedMessage
from tests.consumer.conftest import FAST
from tests.waiting import until


class Heard:
    """Remembers what a listener was given, and answers as it is told."""

    def __init__(self, answer: Callable[..., Any] | None = None) -> None:
        self._answer = answer or (lambda *_: "success")
        self._lock = threading.Lock()
        #: Body, attempt and message group of every message, in the order of the calls.
        self.given: list[tuple[int, int, str | None]] = []
        #: Bodies of what was answered for with success.
        self.done: list[int] = []
        self.sizes: list[int] = []

    def __call__(self, messages: Sequence[ReceivedMessage], context: Any) -> Any:
        with self._lock:
            self.sizes.append(len(messages))
            self.given += [(int(m.body), m.delivery_attempt, m.message_group) for m in messages]
        answer = self._answer(messages, context)
        if answer == "success":
            with self._lock:
                self.done += [int(m.body) for m in messages]
        return answer

    @property
    def bodies(self) -> list[int]:
        """Of all that was given."""
        with self._lock:
            return [body for body, _, _ in self.given]

    def by_group(self) -> dict[str | None, list[int]]:
        """Bodies that were given, by message group."""
        found: dict[str | None, list[int]] = defaultdict(list)
        with self._lock:
            for body, _, message_group in self.given:
                found[message_group].append(body)
        return found

    def wait(self, count: int) -> None:
        """Until so many messages were done."""
        until(
            lambda: len(self.done) >= count,
            what=lambda: f"{count} messages done: {len(self.done)} are",
        )


def consumer(verbs: Broker, group: str, *topics: str, **settings: Any) -> PushConsumer:
    """A consumer that reads topics from their beginning, as fast as tests need it."""
    given = {
        "start_from": "first",
        "threads": 4,
        "pace": FAST,
        "poll_ms": 50,
        "suspend_ms": 10,
        **settings,
    }
    made = PushConsumer(verbs, group, **given)
    for topic in topics:
        made.subscribe(topic)
    return made


def unread(verbs: Broker, group: str) -> int:
    """Messages of all topics that the group is not done with."""
    query = f"SELECT sum(lag) AS n FROM lag WHERE consumer_group = '{group}'"
    return int(verbs.sql(query)["n"][0].as_py() or 0)


def rows_of(verbs: Broker, view: str, group: str, columns: str) -> list[dict[str, Any]]:
    """Some columns of a view, of one group."""
    query = f"SELECT {columns} FROM {view} WHERE consumer_group = '{group}' ORDER BY ALL"
    found: list[dict[str, Any]] = verbs.sql(query).to_pylist()
    return found
