"""A producer of everything at once that goes on while brokers die, and what it is owed."""

import itertools
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from rmq_pipeline.errors import BrokerUnavailableError
from rmq_pipeline.flight.client import Client
from tests.chaos.exchange import FATES, TOPIC, fate, is_left_open

GROUPS: Final = 6
PER_TURN: Final = 6
TURN_S: Final = 0.1
LATER_MS: Final = 1_500
IMMUNITY_MS: Final = 300


@dataclass
class Books:
    """What was answered, and what was asked without an answer: that is there, or it is not."""

    #: Ids of messages that consumers must get, and of those that no consumer may get.
    owed: set[str] = field(default_factory=set)
    never: set[str] = field(default_factory=set)
    maybe: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)
    failures: list[BaseException] = field(default_factory=list)


class Brokerage(threading.Thread):
    """Sends orders, scheduled messages and transactions, and ends a half of these itself."""

    def __init__(self, client: Client, books: Books, *, first: int) -> None:
        super().__init__(name="brokerage")
        self._client, self.books, self._first = client, books, first
        self._over = threading.Event()

    def stop(self) -> None:
        """Send no more; raise what it has raised."""
        self._over.set()
        self.join()
        if self.books.failures:
            raise self.books.failures[0]

    def run(self) -> None:
        """Go on until it is stopped."""
        try:
            for first in itertools.count(self._first, PER_TURN):
                if self._over.wait(TURN_S):
                    return
                self._orders(range(first, first + PER_TURN))
                self._scheduled(range(first, first + 2))
                self._transactions(range(first, first + len(FATES)))
        except BaseException as error:  # noqa: BLE001 - told by stop
            self.books.failures.append(error)

    def _orders(self, numbers: range) -> None:
        groups = [f"g{number % GROUPS}" for number in numbers]
        self._send(table("order", numbers, message_group=groups))

    def _scheduled(self, numbers: range) -> None:
        at_ms = time.time_ns() // 1_000_000 + LATER_MS
        self._send(table("late", numbers, deliver_at_ms=[at_ms] * len(numbers)))

    def _send(self, messages: pa.Table) -> None:
        ids = set(messages["message_id"].to_pylist())
        try:
            self._client.send(TOPIC, messages)
        except BrokerUnavailableError:
            self._lose(ids)
        else:
            self.books.owed |= ids
            self.books.calls["answered"] += 1

    def _transactions(self, numbers: range) -> None:
        messages = table("half", numbers)
        ids = dict(zip(numbers, messages["message_id"].to_pylist(), strict=True))
        self.books.never |= {ids[number] for number in numbers if fate(number) == "rollback"}
        committed = {ids[number] for number in numbers if fate(number) == "commit"}
        try:
            sent = self._client.send_half(
                TOPIC, messages, producer_group="brokers", immunity_ms=IMMUNITY_MS
            )
        except BrokerUnavailableError:
            self._lose(committed)
            return
        self.books.owed |= committed
        self.books.calls["answered"] += 1
        transactions = dict(zip(numbers, sent["transaction_id"].to_pylist(), strict=True))
        mine = [number for number in numbers if not is_left_open(number)]
        ends = {
            "transaction_id": [transactions[number] for number in mine],
            "resolution": [fate(number) for number in mine],
        }
        # It may be repeated, so it is; a check that was quicker has said the same.
        self._client.end_transactions(pa.table(ends), producer_group="brokers")

    def _lose(self, ids: set[str]) -> None:
        self.books.maybe |= ids
        self.books.calls["lost"] += 1


def table(tag: str, numbers: range, **columns: list[str] | list[int]) -> pa.Table:
    """Messages of a tag by their numbers."""
    n = len(numbers)
    return pa.table(
        {
            "body": [b"%d" % number for number in numbers],
            "message_id": [f"{tag}-{number}" for number in numbers],
            "tag": [tag] * n,
            **columns,
        }
    )
