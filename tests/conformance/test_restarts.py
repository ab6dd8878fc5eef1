"""Unmodified clients live through the broker's death: they send and hear on, in order, and all.

The broker starts again, or a standby takes over at the other address that the client has. Node's
client takes one address only.
"""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from rmq_pipeline.flight.client import Client
from tests.conformance import brokers
from tests.free_address import free_address
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.postgres_server import PostgresServer

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

PREFIXES = {"python": "py", "node": "js"}
#: How much goes on before the broker dies, and after it is back.
BEFORE = 200
AFTER_S = 6.0
LEASE_MS = 1000


@dataclass(frozen=True)
class Survived:
    """What a client did, and when the broker was back."""

    sent: list[tuple[int, int]]
    heard: dict[str, list[tuple[int, str, int]]]
    died_ms: int
    back_ms: int

    def patience_ms(self, least_ms: int) -> int:
        """How soon it is to go on: Node's client tries less and less often while no broker answers.

        It waits 1.6 times as long each time, give or take a fifth: up to twice as long as the
        broker was away, where a slow machine took seconds to start it.
        """
        return max(least_ms, 2 * (self.back_ms - self.died_ms))


@dataclass(frozen=True)
class Lives:
    """How a broker begins to serve, the first time and after its death."""

    #: Addresses of gRPC, as RocketMQ's clients take them.
    endpoints: str
    begin: Callable[[], brokers.Served]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def restarting(folder: Path) -> Lives:
    # At a port that no connection of others takes while the broker is dead.
    address = free_address()
    return Lives(address, lambda: brokers.serve(folder / "home", grpc=address))


def succeeding(folder: Path, database: str) -> Lives:
    first, second = free_address(), free_address()
    flags = ("--log", database, "--standby", "--set", f"log_lease_ms={LEASE_MS}")
    standbys: list[brokers.Served] = []

    def begin() -> brokers.Served:
        """Start the broker that leads and its standby, or wait until that one leads."""
        if not standbys:
            leader = brokers.serve(folder / "one", *flags, grpc=first)
            standbys.append(brokers.serve(folder / "two", *flags, grpc=second))
            assert standbys[0].grpc == "-"
            return leader
        with Client(standbys[0].flight) as client:
            until(lambda: client.status()["log_store"]["role"] == "leader")
        return standbys[0]

    return Lives(f"{first};{second}", begin)


class History:
    """Clients that live through one death of their broker."""

    def __init__(self, lives: Lives, clients: dict[str, str]) -> None:
        self._lives, self._clients = lives, clients
        self._served = lives.begin()
        self._officials: dict[str, brokers.Official] = {}
        self._died_ms = self._back_ms = 0

    def live(self) -> None:
        """Let the broker die and come back, and tell the clients to come to an end."""
        with Client(self._served.flight) as client:
            for prefix in self._clients.values():
                client.ensure_topic(f"{prefix}-restart")
                client.ensure_topic(f"{prefix}-restart-fifo", type="fifo")
                client.ensure_group(f"{prefix}-restart-fifo-group", order="message_group")
            for name, prefix in self._clients.items():
                todo = {"place": {"endpoints": self._lives.endpoints, "prefix": prefix}}
                if name == "python":
                    self._officials[name] = brokers.python("python_restart", todo)
                elif shutil.which("node"):
                    self._officials[name] = brokers.node("restart.js", todo)
            running = [self._clients[name] for name in self._officials]
            until(lambda: all(_stored(client, prefix) >= BEFORE for prefix in running))
        self._served.end(kill=True)
        self._died_ms = now_ms()
        self._served = self._lives.begin()
        self._back_ms = now_ms()
        until(lambda: now_ms() - self._back_ms > AFTER_S * 1000)
        for official in self._officials.values():
            official.close_input()

    def facts(self) -> dict[str, Survived]:
        """What each client did, once all have ended."""
        found = {name: official.facts() for name, official in self._officials.items()}
        return {
            name: Survived(facts["sent"], facts["heard"], self._died_ms, self._back_ms)
            for name, facts in found.items()
        }

    def end(self) -> None:
        """End the clients and the broker."""
        for official in self._officials.values():
            official.end()
        self._served.end()


@pytest.fixture(scope="module")
def survived(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer
) -> dict[str, dict[str, Survived]]:
    """The clients at once, and one death of the broker for all of them.

    What was on its way to them is leased for a minute, and they wait for it. The second broker dies
    meanwhile: its clients are at work when those of the first are not.
    """
    lives = {
        "restart": restarting(tmp_path_factory.mktemp("restart")),
        "standby": succeeding(tmp_path_factory.mktemp("standby"), postgres.new_database()),
    }
    clients = {"restart": PREFIXES, "standby": {"python": PREFIXES["python"]}}
    with ExitStack() as stack:
        histories: dict[str, History] = {}
        for how, lived in lives.items():
            history = History(lived, clients[how])
            stack.callback(history.end)
            history.live()
            histories[how] = history
        return {how: history.facts() for how, history in histories.items()}


def _stored(client: Client, prefix: str) -> int:
    offsets = client.describe_topic(f"{prefix}-restart-fifo")["offsets"]
    return sum(row["max_offset"] for row in offsets)


@pytest.fixture(
    params=[("restart", "python"), ("restart", "node"), ("standby", "python")], ids="-".join
)
def client(request: pytest.FixtureRequest, survived: dict[str, dict[str, Survived]]) -> Survived:
    how, name = request.param
    found = survived[how]
    if name not in found:
        pytest.skip("node is not installed: nothing runs the Node client")
    return found[name]


def test_sends_resume_within_three_seconds(client: Survived) -> None:
    resumed_ms = min(at for _, at in client.sent if at > client.died_ms)

    assert resumed_ms - client.back_ms < client.patience_ms(3000)


@pytest.mark.parametrize("topic", ["restart", "restart-fifo"])
def test_consumption_resumes_within_five_seconds(client: Survived, topic: str) -> None:
    resumed_ms = min(at for _, _, at in client.heard[topic] if at > client.died_ms + 100)

    assert resumed_ms - client.back_ms < client.patience_ms(5000)


@pytest.mark.parametrize("topic", ["restart", "restart-fifo"])
def test_nothing_that_was_answered_is_lost(client: Survived, topic: str) -> None:
    heard = {number for number, _, _ in client.heard[topic]}

    assert len(client.sent) > BEFORE
    assert heard >= {number for number, _ in client.sent}


def test_message_groups_are_heard_in_order(client: Survived) -> None:
    first: dict[str, list[int]] = {}
    for number, group, _ in client.heard["restart-fifo"]:
        numbers = first.setdefault(group, [])
        if number not in numbers:
            numbers.append(number)

    assert len(first) == 4
    assert all(numbers == sorted(numbers) for numbers in first.values())
