"""Receivers whose answers get lost, and what those answers say that arrived."""

import itertools
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from rmq_pipeline import errors
from rmq_pipeline.flight.client import Client

TOPIC: Final = "plain"
#: Deliveries until a message is dead-lettered, by consumer group.
GROUPS: Final = {"patient": 1000, "brief": 2}
PAUSE_S: Final = 0.01
LEASES_MS: Final = (300, 1500)
RETRY_MS: Final = 50
#: Bodies of a receive are more than a connection takes at once: who goes away leaves some unsent.
BODY_BYTES: Final = 8_000
LIMIT: Final = 64
#: How long a caller stays who goes away while it waits for an answer.
STAYS_S: Final = 0.06
#: Of deliveries that arrived: acked, failed, and left to the end of their leases.
OUTCOMES: Final = ("ack", "ack", "ack", "retry", "leave")


class Seen(NamedTuple):
    """A delivery of a message whose answer arrived."""

    attempt: int
    asked_at: float
    answered_at: float


@dataclass
class Accounts:
    """What was answered."""

    sent: set[str] = field(default_factory=set)
    #: By consumer group and message id, in the order in which the answers came.
    seen: dict[tuple[str, str], list[Seen]] = field(default_factory=lambda: defaultdict(list))
    #: By consumer group: acks that were answered, with the moment; and those that may count.
    acked: dict[tuple[str, str], float] = field(default_factory=dict)
    tried: set[tuple[str, str]] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def received(self, group: str, got: pa.Table, *, asked_at: float) -> None:
        """The answer to a receive arrived."""
        now = time.monotonic()
        rows = got.select(["message_id", "delivery_attempt"]).to_pylist()
        with self.lock:
            self.calls["arrived"] += bool(rows)
            for row in rows:
                key, attempt = (group, row["message_id"]), row["delivery_attempt"]
                self.violations += [
                    f"{key}: delivery {attempt} asked for after delivery {before.attempt} had come"
                    for before in self.seen[key]
                    if attempt == before.attempt
                    or (before.answered_at < asked_at and attempt < before.attempt)
                ]
                # The answers of two receives at once are noted in any order.
                earlier = self.seen[key]
                self.calls["noted late"] += bool(earlier) and attempt < earlier[-1].attempt
                if attempt > GROUPS[group]:
                    self.violations.append(f"{key}: delivery {attempt} of {GROUPS[group]}")
                if self.acked.get(key, asked_at) < asked_at:
                    self.violations.append(f"{key}: delivery {attempt} after its ack")
                self.seen[key].append(Seen(attempt, asked_at, now))


class Users:
    """Threads that send, receive and keep the archive of a home whose broker dies."""

    def __init__(self, home: Path, accounts: Accounts, *, seed: int) -> None:
        self._home, self.accounts = home, accounts
        self._dice = random.Random(seed)
        self.over = threading.Event()
        self._no_sends, self._stays = threading.Event(), threading.Event()
        self._failures: list[BaseException] = []
        work: list[Callable[[], None]] = [self._send, self._tend]
        work += [partial(self._receive, group) for group in GROUPS for _ in range(2)]
        self._threads = [threading.Thread(target=self._guard, args=(one,)) for one in work]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def settle_down(self) -> None:
        """Send no more, and lose no more answers."""
        self._no_sends.set()
        self._stays.set()

    def stop(self) -> None:
        """End all of it; raise what a thread has raised."""
        self._no_sends.set()
        self.over.set()
        for thread in self._threads:
            thread.join()
        assert self.go_on()

    def go_on(self) -> bool:
        """Raise what a thread has raised, and what broke a promise; True without."""
        if self._failures:
            raise self._failures[0]
        assert self.accounts.violations == []
        return True

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by ``go_on``
            self._failures.append(error)

    def _send(self) -> None:
        with Client(home=self._home, retry_s=0) as client:
            for first in itertools.count(step=20):
                if self._no_sends.wait(5 * PAUSE_S):
                    return
                ids = [f"m-{number}" for number in range(first, first + 20)]
                bodies = [os.urandom(BODY_BYTES) for _ in ids]
                try:
                    client.send(TOPIC, pa.table({"body": bodies, "message_id": ids}))
                except errors.BrokerUnavailableError:
                    self.accounts.calls["sends lost"] += 1
                else:
                    self.accounts.sent.update(ids)

    def _tend(self) -> None:
        with Client(home=self._home, retry_s=0) as client:
            while not self.over.wait(5 * PAUSE_S):
                for verb in (client.seal, client.compact, client.expire):
                    try:
                        verb()
                    except errors.BrokerUnavailableError:
                        break
                    self.accounts.calls[verb.__name__] += 1

    def _receive(self, group: str) -> None:
        dice = random.Random(self._dice.random())
        with Client(home=self._home, retry_s=0) as client:
            while not self.over.is_set():
                goes = not self._stays.is_set() and dice.random() < 0.3
                try:
                    if goes:
                        self._receive_and_go(group, dice)
                    else:
                        self._settle(client, group, self._ask(client, group, dice), dice=dice)
                except errors.BrokerUnavailableError:
                    self.accounts.calls["receives or settles lost"] += 1
                    self.over.wait(PAUSE_S)

    def _receive_and_go(self, group: str, dice: random.Random) -> None:
        client = Client(home=self._home, retry_s=0)
        leaving = threading.Timer(dice.uniform(0, STAYS_S), client.close)
        leaving.start()
        try:
            self._ask(client, group, dice)
        finally:
            leaving.join()

    def _ask(self, client: Client, group: str, dice: random.Random) -> pa.Table:
        asked_at = time.monotonic()
        got = client.receive(
            group,
            TOPIC,
            limit=LIMIT,
            invisible_duration_ms=dice.randint(*LEASES_MS),
            wait_ms=dice.choice([0, 200, 2_000]),
        )
        self.accounts.received(group, got, asked_at=asked_at)
        return got

    def _settle(self, client: Client, group: str, got: pa.Table, *, dice: random.Random) -> None:
        chosen = dice.choices(OUTCOMES, k=got.num_rows)
        ids = got["message_id"].to_pylist()
        kept = [row for row, outcome in enumerate(chosen) if outcome != "leave"]
        if not kept:
            return
        acks = [(group, ids[row]) for row in kept if chosen[row] == "ack"]
        with self.accounts.lock:
            self.accounts.tried.update(acks)
        settled = pa.table(
            {
                "receipt_handle": got["receipt_handle"].take(kept),
                "outcome": [chosen[row] for row in kept],
                "retry_after_ms": [RETRY_MS] * len(kept),
            }
        )
        try:
            client.settle(group, settled)
        except errors.ReceiptHandleError:
            self.accounts.calls["settles refused"] += 1
        else:
            now = time.monotonic()
            with self.accounts.lock:
                self.accounts.acked.update(dict.fromkeys(acks, now))
