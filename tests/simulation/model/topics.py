"""What is stored, what waits for its time, and what is half a message."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.simulation.model.consumer import Consumer

CHECKS, IMMUNITY_MS, CHECK_INTERVAL_MS = 2, 500, 1_000
REPEAT_MS = 2_000


@dataclass(eq=False)
class Half:
    """A half message; ``state`` is open or how it ended."""

    topic: str
    transaction_id: str
    due: int
    checks: int = 0
    state: str = "open"


@dataclass(eq=False)
class Topic:
    """A topic: its queues, what lies in them, and which of that a new message would repeat."""

    queues: int
    deduplicate: str = "none"
    #: Minimum retention of its messages; None: permanent.
    kept_ms: int | None = None
    #: When each message was stored; those that have expired are not there any more.
    stored: dict[int, int] = field(default_factory=dict)
    #: When each id, or key, was stored, and by which message.
    known: dict[str, tuple[int, int]] = field(default_factory=dict)

    def suppress(self, deduplicate: str) -> None:
        if deduplicate != self.deduplicate:
            self.deduplicate, self.known = deduplicate, {}

    def repeats(self, number: int, names: tuple[str, str], *, now: int) -> int | None:
        """The message that one of this id and key repeats; else it is known from now on."""
        if self.deduplicate == "none":
            return None
        name = names[self.deduplicate == "key"]
        at, first = self.known.get(name, (now - REPEAT_MS, 0))
        if now - at < REPEAT_MS:
            return first
        self.known[name] = (now, number)
        return None

    def forget(self, number: int) -> None:
        self.known = {name: row for name, row in self.known.items() if row[1] != number}


@dataclass(eq=False)
class Model:
    """All there is: topics, consumer groups, scheduled messages, half messages."""

    topics: dict[str, Topic]
    consumers: list[Consumer]
    #: The id and the key of each message.
    names: dict[int, tuple[str, str]] = field(default_factory=dict)
    #: Scheduled messages: when they are due, their topics and message groups.
    scheduled: dict[int, tuple[int, str, str]] = field(default_factory=dict)
    halves: dict[int, Half] = field(default_factory=dict)

    def send(
        self, topic: str, number: int, *, now: int, key: str = "", priority: int = 0
    ) -> int | None:
        """It is stored, unless it repeats the message that is answered."""
        first = self.topics[topic].repeats(number, self.names[number], now=now)
        if first is None:
            self.store(topic, number, key=key, priority=priority, now=now)
        return first

    def schedule(self, topic: str, number: int, *, now: int, at: int, key: str) -> int | None:
        """The same for one that has a time."""
        first = self.topics[topic].repeats(number, self.names[number], now=now)
        if first is None:
            self.scheduled[number] = (at, topic, key)
        return first

    def store(self, topic: str, number: int, *, now: int, key: str = "", priority: int = 0) -> None:
        stored = self.topics[topic].stored
        assert number not in stored, "stored twice"
        stored[number] = now
        queue = min(priority, self.topics[topic].queues - 1)
        for consumer in (one for one in self.consumers if one.topic == topic):
            consumer.store(number, key, priority=queue, now=now)

    def expire(self, name: str, number: int, *, now: int) -> None:
        """The message has expired: it was old enough, and not in flight."""
        topic = self.topics[name]
        at = topic.stored.pop(number)
        assert topic.kept_ms is not None
        assert at + topic.kept_ms <= now, f"{number} went early"
        for consumer in (one for one in self.consumers if one.topic == name):
            consumer.lose(number)

    def deliver(self, now: int, limit: int) -> int:
        """Scheduled messages whose time has come reach their topics, the earliest first."""
        due = sorted((at, n) for n, (at, _, _) in self.scheduled.items() if at <= now)[:limit]
        for _, number in due:
            _, topic, key = self.scheduled.pop(number)
            self.store(topic, number, key=key, now=now)
        return len(due)

    def recall(self, number: int) -> None:
        """It is called back, and may be sent again."""
        _, topic, _ = self.scheduled.pop(number)
        self.topics[topic].forget(number)

    def check(self, now: int) -> tuple[list[int], int]:
        """Half messages that are asked about now, and how many are given up."""
        due = [n for n, half in self.halves.items() if half.state == "open" and half.due <= now]
        for number in due:
            half = self.halves[number]
            half.state = "open" if half.checks < CHECKS else "given_up"
            half.checks, half.due = half.checks + 1, now + CHECK_INTERVAL_MS
        asked = [number for number in due if self.halves[number].state == "open"]
        return asked, len(due) - len(asked)
