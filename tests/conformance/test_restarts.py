"""Unmodified clients live through the broker's death: they send and hear on, in order, and all.

The broker starts again, or a standby takes over at the other address that the client has. Node's
client takes one address only.
"""

from __future__ import annotations

import functools
import shutil
import time
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

pytestmark = [pytest.mark.slow, pytest.mark.alone]

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


@pytest.fixture(scope="module")
def survived(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer
) -> Callable[[str], dict[str, Survived]]:
    """The clients at once, and one death of the broker for all of them."""

    @functools.cache
    def live(how: str) -> dict[str, Survived]:
        folder = tmp_path_factory.mktemp(how)
        if how == "restart":
            return _survived(restarting(folder), PREFIXES)
        lives = succeeding(folder, postgres.new_database())
        return _survived(lives, {"python": PREFIXES["python"]})

    return live


def _survived(lives: Lives, clients: dict[str, str]) -> dict[str, Survived]:
    served = lives.begin()
    officials: dict[str, brokers.Official] = {}
    try:
        with Client(served.flight) as client:
            for prefix in clients.values():
                client.ensure_topic(f"{prefix}-restart")
                client.ensure_topic(f"{prefix}-restart-fifo", type="fifo")
                client.ensure_group(f"{prefix}-restart-fifo-group", order="message_group")
            for name, prefix in clients.items():
                todo = {"place": {"endpoints": lives.endpoints, "prefix": prefix}}
                if name == "python":
                    officials[name] = brokers.python("python_restart", todo)
                elif shutil.which("node"):
                    officials[name] = brokers.node("restart.js", todo)
            running = [clients[name] for name in officials]
            until(lambda: all(_stored(client, prefix) >= BEFORE for prefix in running))
        served.end(kill=True)
        died_ms = now_ms()
        served = lives.begin()
        back_ms = now_ms()
        until(lambda: now_ms() - back_ms > AFTER_S * 1000)
        for official in officials.values():
            official.close_input()
        found = {name: official.facts() for name, official in officials.items()}
        return {
            name: Survived(facts["sent"], facts["heard"], died_ms, back_ms)
            for name, facts in found.items()
        }
    finally:
        for official in officials.values():
            official.end()
        served.end()


def _stored(client: Client, prefix: str) -> int:
    offsets = client.describe_topic(f"{prefix}-restart-fifo")["offsets"]
    return sum(row["max_offset"] for row in offsets)


@pytest.fixture(
    params=[("restart", "python"), ("restart", "node"), ("standby", "python")], ids="-".join
)
def client(
    request: pytest.FixtureRequest, survived: Callable[[str], dict[str, Survived]]
) -> Survived:
    how, name = request.param
    found = survived(how)
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
