"""Histories from one number: whatever happens, the broker keeps what a small model promises."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.settings import Settings

SEEDS = range(20)
STEPS = 80
MAX_ATTEMPTS = 3
NEVER = 1 << 62
BACKOFF_MS = 700
TOPICS = {"ordered": "fifo", "loose": "normal", "later": "delay"}
GROUPS = "abc"


@dataclass
class Message:
    """What the model knows of one message; ``free_at`` is when it may be delivered."""

    number: int
    topic: str
    group: str
    free_at: int
    attempts: int = 0
    leased_until: int = 0
    delivery: int = 0
    receipt: str = ""
    gone: str = ""
    parked: bool = False


@dataclass
class Model:
    """The promises, message by message."""

    messages: list[Message] = field(default_factory=list)
    deliveries: int = 0
    #: What the consumer group of each topic makes of a final failure.
    on_failure: dict[str, str] = field(default_factory=dict)
    #: Message groups that are given up, and the message with which each was.
    condemned: dict[str, int] = field(default_factory=dict)

    def expire(self, now: int) -> None:
        """Leases that have ended, the earliest first: what lies behind one is released."""
        ended = [m for m in self.messages if m.receipt and m.leased_until <= now]
        for message in sorted(ended, key=lambda m: (m.leased_until, m.number)):
            if message.receipt:
                self.fail(message, message.leased_until)

    def fail(self, message: Message, free_at: int) -> None:
        """A delivery failed or ended; in order, the later ones of it are given back uncharged."""
        message.receipt = ""
        message.free_at = free_at
        if message.attempts >= MAX_ATTEMPTS:
            self.give_up(message, hopeless=False)
        if message.topic == "ordered":
            for other in self.messages:
                same = other.receipt and other.delivery == message.delivery
                if same and other.group == message.group and other.number > message.number:
                    other.receipt = ""
                    other.attempts -= 1

    def give_up(self, message: Message, *, hopeless: bool) -> None:
        """A final failure; ``hopeless`` is the consumer's own verdict."""
        policy = self.on_failure[message.topic]
        if policy == "park" and not hopeless:
            message.parked, message.free_at = True, NEVER
            return
        message.parked, message.gone = False, "dead"
        if policy == "dead_letter_group" and message.topic == "ordered":
            first = self.condemned.get(message.group, message.number)
            self.condemned[message.group] = min(first, message.number)
            self.doom()

    def doom(self) -> None:
        """What is left of given-up message groups goes to the dead letters."""
        for message in self.messages:
            given_up = message.number > self.condemned.get(message.group, NEVER)
            if message.topic == "ordered" and given_up and not message.gone:
                message.receipt, message.gone = "", "dead"

    def unpark(self, topic: str, now: int, *, skip: bool) -> int:
        """Parked messages begin again or are skipped; given-up groups are pardoned; how many."""
        parked = [m for m in self.messages if m.topic == topic and m.parked]
        for message in parked:
            message.parked, message.free_at, message.attempts = False, now, 0
            message.gone = "dead" if skip else ""
            for other in self.messages:
                behind = other.topic == topic == "ordered" and other.group == message.group
                if behind and other.number > message.number and not other.parked:
                    other.free_at = min(other.free_at, now)
        if topic == "ordered":
            self.condemned.clear()
        return len(parked)

    def deliverable(self, topic: str, now: int) -> dict[str, list[Message]]:
        """What may be delivered, by message group in order; unordered ones under their number."""
        found: dict[str, list[Message]] = defaultdict(list)
        stopped = {m.group for m in self.messages if m.topic == "ordered" and m.receipt}
        for message in self.messages:
            if message.topic != topic or message.gone:
                continue
            key = message.group if topic == "ordered" else str(message.number)
            if message.receipt or message.free_at > now:
                stopped.add(key)
            elif key not in stopped:
                found[key].append(message)
        return found


class History:
    """A broker and a model that are told the same."""

    def __init__(self, seed: int, home: Path) -> None:
        self.random = random.Random(seed)
        self.home = home
        self.clock = ManualClock()
        self.model = Model()
        self.told: list[str] = []
        self.broker = self.open()
        for name, kind in TOPICS.items():
            self.broker.create_topic(name, type=kind, queues=self.random.randint(1, 3))
            policy = self.random.choice(("dead_letter", "park", "dead_letter_group"))
            self.model.on_failure[name] = policy
            self.broker.create_group(
                f"of-{name}",
                on_failure=policy,
                order="message_group" if name == "ordered" else "none",
                max_attempts=MAX_ATTEMPTS,
                backoff_ms=[BACKOFF_MS],
            )

    def open(self) -> Broker:
        settings = Settings(reserve_bytes=0, log_file_bytes=1024 * 1024)
        return Broker.open(self.home, clock=self.clock, upkeep="none", settings=settings)

    def step(self) -> None:
        """Something happens."""
        what = self.random.choices(
            (
                *(self.send, self.receive, self.settle, self.change),
                *(self.advance, self.upkeep, self.restart, self.unpark),
            ),
            weights=(20, 30, 30, 5, 15, 8, 3, 4),
        )[0]
        self.told.append(what.__name__)
        what()

    def send(self) -> None:
        topic = self.random.choice(list(TOPICS))
        now, first = self.clock.now_ms(), len(self.model.messages)
        new = [
            Message(first + i, topic, self.random.choice(GROUPS), now)
            for i in range(self.random.randint(1, 9))
        ]
        table: dict[str, Any] = {"body": [str(m.number).encode() for m in new]}
        if topic == "ordered":
            table["message_group"] = [m.group for m in new]
        if topic == "later":
            for message in new:
                message.free_at = now + self.random.choice((1, 50, 1_000, 3_000))
            table["deliver_at_ms"] = [m.free_at for m in new]
        self.model.messages += new
        self.broker.send(topic, pa.table(table))
        self.model.doom()

    def unpark(self) -> None:
        """Unpark a group; what it has given up so far is read to the end before."""
        topic, skip = self.random.choice(list(TOPICS)), self.random.random() < 0.3
        while self.take(topic, 100):
            pass
        of_given_up = (m for m in self.model.messages if m.group in self.model.condemned)
        if topic == "ordered" and any(m.topic == topic and not m.gone for m in of_given_up):
            return  # what was delivered before may yet be settled, and holds back what goes
        now = self.clock.now_ms()
        done = self.broker.unpark(f"of-{topic}", skip=skip)
        assert done["skipped" if skip else "unparked"] == self.model.unpark(topic, now, skip=skip)

    def receive(self) -> None:
        self.take(self.random.choice(list(TOPICS)), self.random.choice((1, 3, 8, 100)))

    def take(self, topic: str, limit: int) -> set[str]:
        """One receive, held against the model; the groups it gave."""
        now, until = self.clock.now_ms(), self.random.choice((100, 500, 2_000))
        self.model.expire(now)
        allowed = self.model.deliverable(topic, now)
        got = self.broker.receive(
            topic, f"of-{topic}", limit=limit, invisible_duration_ms=until
        ).to_pylist()
        self.model.deliveries += 1
        given: dict[str, list[int]] = defaultdict(list)
        for row in got:
            message = self.model.messages[int(row["body"])]
            key = message.group if topic == "ordered" else str(message.number)
            given[key].append(message.number)
            message.attempts += 1
            message.leased_until, message.receipt = now + until, row["receipt_handle"]
            message.delivery = self.model.deliveries
            assert row["delivery_attempt"] == message.attempts, message
        for key, numbers in given.items():
            expected = [m.number for m in allowed.get(key, [])]
            assert numbers == expected[: len(numbers)], f"{key}: {numbers} of {expected}"
        assert len(got) <= limit
        return set(given)

    def settle(self) -> None:
        """Acknowledge, fail or give up some of what one topic has in flight."""
        topic = self.random.choice(list(TOPICS))
        now = self.clock.now_ms()
        self.model.expire(now)
        flying = [m for m in self.model.messages if m.topic == topic and m.receipt]
        some = [m for m in flying if self.random.random() < 0.6]
        if self.random.random() < 0.6:
            outcome, after = "ack", None
        else:
            outcome = self.random.choice(("retry", "retry", "retry", "dead_letter"))
            after = self.random.choice((None, 0, 90))
            firsts = {m.group: m for m in reversed(some)}
            some = list(firsts.values()) if topic == "ordered" else some
        rows = [
            {"receipt_handle": m.receipt, "outcome": outcome, "retry_after_ms": after} for m in some
        ]
        table = pa.Table.from_pylist(rows, schema=schema.OUTCOME)
        self.broker.settle(f"of-{topic}", table)
        for message in some:
            if outcome == "ack":
                message.receipt, message.gone = "", "acked"
            elif outcome == "dead_letter":
                self.model.fail(message, now)
                self.model.give_up(message, hopeless=True)
            else:
                self.model.fail(message, now + (BACKOFF_MS if after is None else after))

    def change(self) -> None:
        """Other ends for some leases; one inside a delivery in order is test_fifo's matter."""
        now, until = self.clock.now_ms(), self.random.choice((1, 300, 5_000))
        self.model.expire(now)
        flying = [m for m in self.model.messages if m.topic != "ordered" and m.receipt]
        some = [m for m in flying if self.random.random() < 0.4]
        renewed = self.broker.change_invisible_duration([m.receipt for m in some], until)
        for message, receipt in zip(some, renewed["receipt_handle"].to_pylist(), strict=True):
            message.receipt, message.leased_until = receipt, now + until

    def advance(self) -> None:
        self.clock.advance(self.random.choice((1, 49, 100, 400, 1_000)))

    def upkeep(self) -> None:
        self.broker.deliver_scheduled(limit=self.random.choice((1, 5, 1_000)))
        self.broker.revive()

    def restart(self) -> None:
        self.broker.close()
        self.broker = self.open()

    def take_all(self) -> None:
        """Everything the model would deliver now is delivered: nothing is lost or forgotten."""
        while self.broker.deliver_scheduled()["delivered"]:
            pass
        self.model.expire(self.clock.now_ms())
        self.broker.revive()
        for topic in TOPICS:
            expected = set(self.model.deliverable(topic, self.clock.now_ms()))
            given: set[str] = set()
            while some := self.take(topic, 100):
                given |= some
            assert given == expected, topic

    def finish(self) -> None:
        """Until every message is acknowledged or dead; and the dead are those of the model."""
        while any(not m.gone for m in self.model.messages):
            self.clock.advance(4_000)
            self.unpark()
            self.take_all()
            for message in self.model.messages:
                if message.receipt:
                    self.broker.ack([message.receipt])
                    message.receipt, message.gone = "", "acked"
        self.take_all()
        for topic in TOPICS:
            dead = self.broker.read(f"%DLQ%of-{topic}", 0, offset=0, limit=100_000)
            expected = {
                m.number for m in self.model.messages if (m.topic, m.gone) == (topic, "dead")
            }
            assert sorted(int(b) for b in dead["body"].to_pylist()) == sorted(expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_the_promises_hold(seed: int, tmp_path: Path) -> None:
    history = History(seed, tmp_path / "home")

    try:
        for number in range(STEPS):
            history.step()
            if number % 20 == 19:
                history.take_all()
        history.finish()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, after {history.told[-12:]}: {error}") from error
    finally:
        history.broker.close()
