"""Senders and receivers that go on while brokers die, and a ledger of what they were answered."""

import itertools
import json
import os
import threading
import time
from bisect import insort
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pyarrow as pa

from rmq_pipeline import errors
from rmq_pipeline.flight.client import Client

PAUSE_S = 0.01
#: A lease whose answer was lost is over soon.
LEASE_MS = 1500


@dataclass
class Ledger:
    """What was answered, by message id, and what broke a promise."""

    #: topic, queue_id, queue_offset, body of messages whose send was answered.
    sent: dict[str, tuple[str, int, int, bytes]] = field(default_factory=dict)
    delivered: set[str] = field(default_factory=set)
    #: When the answer to the ack came.
    acked: dict[str, float] = field(default_factory=dict)
    #: How many acks were asked for that may have been carried out: two may have a message, of whom
    #: one is refused.
    tried: Counter[str] = field(default_factory=Counter)
    #: Numbers answered, and the id of each, by message group.
    numbers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    ids: dict[tuple[str, int], str] = field(default_factory=dict)
    #: Up to which place of ``numbers`` everything was tried.
    done: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    again: int = 0
    lost_calls: int = 0
    violations: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, topic: str, messages: pa.Table, sent: pa.Table) -> None:
        """A send was answered."""
        with self.lock:
            for message, place in zip(messages.to_pylist(), sent.to_pylist(), strict=True):
                body, where = message["body"], (place["queue_id"], place["queue_offset"])
                assert place["message_id"] == message["message_id"]
                self.sent[place["message_id"]] = (topic, *where, body)
                if group := message.get("message_group"):
                    number = json.loads(body.partition(b"\n")[0])
                    insort(self.numbers[group], number)
                    self.ids[group, number] = place["message_id"]

    def received(self, got: pa.Table, *, asked_at: float) -> None:
        """A receive was answered that was asked for at a time."""
        with self.lock:
            last: dict[str, int] = {}
            for row in got.select(["message_id", "message_group", "body"]).to_pylist():
                message_id, group = row["message_id"], row["message_group"]
                if self.acked.get(message_id, asked_at) < asked_at:
                    self.violations.append(f"{message_id} came again after its ack")
                self.again += message_id in self.delivered
                self.delivered.add(message_id)
                if group:
                    number = json.loads(row["body"].partition(b"\n")[0])
                    if number <= last.get(group, -1):
                        self.violations.append(f"{group}: {number} after {last[group]}")
                    if group not in last:
                        self._check_before(group, number)
                    last[group] = number

    def _check_before(self, group: str, first: int) -> None:
        """Whatever was answered before the first of a delivery is settled, or may be."""
        numbers, at = self.numbers[group], self.done[group]
        while at < len(numbers) and numbers[at] < first:
            if not self.tried[self.ids[group, numbers[at]]]:
                self.violations.append(f"{group}: {first} delivered before {numbers[at]}")
            at += 1
        self.done[group] = max(0, at - 1)


@dataclass
class Traffic:
    """Threads against the broker of a home."""

    client: Client
    ledger: Ledger
    sending: threading.Event = field(default_factory=threading.Event)
    receiving: threading.Event = field(default_factory=threading.Event)
    failures: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        senders = [("plain", 1, 0), ("plain", 50, 0), ("ordered", 20, 10)]
        receivers = [("plain", "readers"), ("plain", "readers"), ("ordered", "followers")]
        self._senders = [
            threading.Thread(target=self._guard, args=(self._send, number, *kind))
            for number, kind in enumerate(senders)
        ]
        self._receivers = [
            threading.Thread(target=self._guard, args=(self._receive, *kind))
            for kind in [*receivers, receivers[-1]]
        ]

    def start(self) -> None:
        """Begin."""
        for thread in (*self._senders, *self._receivers):
            thread.start()

    def stop_sending(self) -> None:
        """End the senders."""
        self.sending.set()
        for thread in self._senders:
            thread.join()

    def stop(self) -> None:
        """End everything; raise what a thread has raised."""
        self.stop_sending()
        self.receiving.set()
        for thread in self._receivers:
            thread.join()
        if self.failures:
            raise self.failures[0]

    def _guard(self, work: object, *args: object) -> None:
        try:
            work(*args)  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001 - raised by ``stop``
            self.failures.append(error)

    def _send(self, sender: int, topic: str, rows: int, groups: int) -> None:
        for first in itertools.count(step=rows):
            if self.sending.wait(PAUSE_S):
                return
            numbers = range(first, first + rows)
            columns = {
                "body": [b"%d\n" % number + os.urandom(300) for number in numbers],
                "message_id": [f"{sender}-{number}" for number in numbers],
                "keys": [[f"key-{number}"] for number in numbers],
            }
            if groups:
                columns["message_group"] = [f"{sender}-{number % groups}" for number in numbers]
            messages = pa.table(columns)
            try:
                sent = self.client.send(topic, messages)
            except (errors.BrokerUnavailableError, errors.LogStoreError):
                self.ledger.lost_calls += 1
            else:
                self.ledger.answered(topic, messages, sent)

    def _receive(self, topic: str, group: str) -> None:
        ledger = self.ledger
        while not self.receiving.is_set():
            asked_at = time.monotonic()
            try:
                got = self.client.receive(
                    group, topic, limit=100, invisible_duration_ms=LEASE_MS, wait_ms=200
                )
                ledger.received(got, asked_at=asked_at)
                ids = got["message_id"].to_pylist()
                with ledger.lock:
                    ledger.tried.update(ids)
                try:
                    self.client.ack(got)
                except errors.ReceiptHandleError:
                    with ledger.lock:
                        ledger.tried.subtract(ids)
                else:
                    ledger.acked.update(dict.fromkeys(ids, time.monotonic()))
            except (errors.BrokerUnavailableError, errors.LogStoreError):
                ledger.lost_calls += 1
                self.receiving.wait(PAUSE_S)
