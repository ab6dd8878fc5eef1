"""Checks that a caller keeps for itself while it works on them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline import limits
from rmq_pipeline.broker import Broker
from rmq_pipeline.flight import transactions as producing
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.flight.transactions import kept_checks
from rmq_pipeline.settings import Settings
from tests.conftest import Eventually
from tests.free_address import free_address

#: In real time, because a producer polls: a check is due at once, and again soon.
QUICK = Settings(
    reserve_bytes=1024 * 1024,
    log_file_bytes=8 * 1024 * 1024,
    transaction_immunity_ms=1,
    transaction_check_interval_ms=1_000,
)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "home", upkeep="none", settings=QUICK) as broker:
        broker.create_topic("orders", type="transaction", queues=1)
        yield broker


@pytest.fixture
def client(broker: Broker) -> Iterator[Client]:
    with FlightServer(broker) as server, Client(server.address, retry_s=0) as client:
        yield client


def messages(*bodies: bytes) -> pa.Table:
    return pa.table({"body": list(bodies)})


def delivered(broker: Broker) -> list[bytes]:
    found: list[bytes] = broker.read("orders", 0, offset=0, limit=100)["body"].to_pylist()
    return found


def still_open(broker: Broker) -> int:
    return int(broker.sql("FROM half").num_rows)


def sweep(broker: Broker, n: int) -> int:
    """Count so many checks, waiting for them to be due; how many were."""
    return int(broker.check_transactions(wait_ms=10_000, limit=n)["checked"])


def test_a_checker_slower_than_the_checks_is_asked_once(
    broker: Broker, client: Client, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """Two producers of a group, and checks that fall due while one of them works."""
    monkeypatch.setattr(producing, "KEEP_S", 0.1)
    monkeypatch.setattr(limits, "PRODUCER_LIVE_MS", 1_500)
    asked: list[bytes] = []
    answer = threading.Event()

    def slow(halves: pa.Table) -> list[str]:
        asked.extend(halves["body"].to_pylist())
        assert answer.wait(60)
        return ["commit"] * halves.num_rows

    with client.producer("p", checker=slow), client.producer("p", checker=slow):
        client.send_half("orders", messages(b"a"), producer_group="p")
        sweep(broker, 1)
        eventually(lambda: asked == [b"a"])
        # More than one may be counted in all; each is due a second after the one before.
        due = [sweep(broker, 1) for _ in range(4)]
        counted = broker.sql("SELECT checks FROM half")["checks"].to_pylist()
        answer.set()
        eventually(lambda: still_open(broker) == 0)

    assert due == [1] * 4
    assert counted == [1]
    assert asked == [b"a"]
    assert delivered(broker) == [b"a"]


def test_the_checks_of_a_checker_that_died_are_asked_again(
    broker: Broker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PRODUCER_LIVE_MS", 1_500)
    client.send_half("orders", messages(b"a"), producer_group="p")
    sweep(broker, 1)
    given = client.fetch_checks(producer_group="p", holder="one")
    client.keep_checks("one")
    for _ in range(3):
        sweep(broker, 1)

    again = client.fetch_checks(producer_group="p", holder="two")

    assert given["body"].to_pylist() == again["body"].to_pylist() == [b"a"]


def test_a_checker_at_work_over_a_restart_of_the_broker_is_asked_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    eventually: Eventually,
) -> None:
    """The broker that comes back knows of no holder; the one at work tells it."""
    monkeypatch.setattr(producing, "KEEP_S", 0.1)
    home, asked, answer = tmp_path / "home", list[bytes](), threading.Event()

    def slow(halves: pa.Table) -> list[str]:
        asked.extend(halves["body"].to_pylist())
        assert answer.wait(60)
        return ["commit"] * halves.num_rows

    with Broker.open(home, upkeep="none", settings=QUICK) as broker:
        broker.create_topic("orders", type="transaction", queues=1)
        server = FlightServer(broker, free_address())
        client = Client(server.address, retry_s=0)
        producer = client.producer("p", checker=slow)
        client.send_half("orders", messages(b"a"), producer_group="p")
        sweep(broker, 1)
        eventually(lambda: asked == [b"a"])
        server.shutdown()
    with (
        Broker.open(home, upkeep="none", settings=QUICK) as broker,
        FlightServer(broker, server.address),
    ):
        eventually(lambda: broker.engine.offers._held)
        counted = broker.sql("SELECT checks FROM half")["checks"].to_pylist()
        for _ in range(2):
            sweep(broker, 1)
        other = broker.fetch_checks(topics=["orders"])
        still = broker.sql("SELECT checks FROM half")["checks"].to_pylist()
        answer.set()
        eventually(lambda: still_open(broker) == 0)
        producer.close()
        client.close()

    assert other.num_rows == 0
    assert still == counted == [1]
    assert asked == [b"a"]
    assert "has worked for" in caplog.text


def test_a_checker_is_told_that_somebody_else_is_asked_about_its_checks(
    broker: Broker,
    client: Client,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client.send_half("orders", messages(b"a", b"b"), producer_group="p")
    sweep(broker, 2)
    checks = client.fetch_checks(producer_group="p", holder="one")
    ids = checks.select(["transaction_id"])
    assert broker.keep_checks("another", ids.slice(1)) == 0
    broker.keep_checks("one", ids.slice(0, 1))
    broker.keep_checks("another", ids.slice(1))

    with kept_checks(client, checks, holder="one", who="producer group p", every_s=60):
        held = broker.keep_checks("one")

    assert held == 1
    assert "keeps 1 of 2 half messages for the checker of producer group p" in caplog.text
    assert broker.keep_checks("one") == 0


def test_an_answer_of_unknown_releases_the_checks(broker: Broker, client: Client) -> None:
    """They are asked about again when they are due, not a minute later."""
    client.send_half("orders", messages(b"a"), producer_group="p")
    sweep(broker, 1)
    checks = client.fetch_checks(producer_group="p", holder="one")

    with kept_checks(client, checks, holder="one", who="producer group p", every_s=60):
        pass
    sweep(broker, 1)

    assert broker.sql("SELECT checks FROM half")["checks"].to_pylist() == [2]
    assert client.fetch_checks(producer_group="p").num_rows == 1
