"""``rmq broker --standby``, ``rmq promote``, and clients that know both addresses."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.errors import StandbyError
from rmq_pipeline.flight.client import Client
from tests.conformance import brokers
from tests.conformance.brokers import RMQ, Served
from tests.free_address import free_address
from tests.postgres_server import PostgresServer


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer
) -> Iterator[tuple[Served, Served]]:
    folder, flags = tmp_path_factory.mktemp("pair"), ("--log", postgres.new_database(), "--standby")
    leader = brokers.serve(folder / "one", *flags, "--set", "failover=manual")
    grpc = free_address()
    standby = brokers.serve(folder / "two", *flags, "--set", "failover=manual", grpc=grpc)
    yield leader, standby
    for each in (standby, leader):
        each.end()


def rmq(*arguments: str, flight: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "RMQ_FLIGHT": flight}
    return subprocess.run(
        [RMQ, *arguments], check=False, capture_output=True, text=True, env=environment
    )


def test_a_planned_change_of_leaders(pair: tuple[Served, Served]) -> None:
    """Commands, a client and the standby's line, before and after ``rmq promote --force``."""
    leader, standby = pair
    assert standby.grpc == "-"
    both = f"{standby.flight},{leader.flight}"
    assert rmq("topic", "create", "orders", "--queues", "1", flight=both).returncode == 0
    refused = rmq("send", "orders", "--body", "a", flight=standby.flight)
    assert refused.returncode != 0
    assert "is a standby" in refused.stderr
    assert "addresses of both" in refused.stderr
    unclear = rmq("promote", flight=both)
    assert unclear.returncode != 0
    assert "--flight HOST:PORT" in unclear.stderr
    held = rmq("promote", flight=standby.flight)
    assert held.returncode != 0
    assert "led by" in held.stderr
    with Client(both) as client:
        client.send("orders", pa.table({"body": [b"a"]}))

        promoted = rmq("promote", "--force", flight=standby.flight)

        assert "leads now, under epoch 2" in promoted.stdout
        assert standby.process.stdout is not None
        line = standby.process.stdout.readline()
        assert line.startswith("ready grpc=127.0.0.1:")
        assert "role" not in line
        # A send beside the leader's end would be in doubt; a read is repeated.
        assert leader.process.wait(timeout=30) == 77
        assert client.read("orders", 0, offset=0, limit=10)["body"].to_pylist() == [b"a"]
        client.send("orders", pa.table({"body": [b"b"]}))
        found = client.read("orders", 0, offset=0, limit=10)["body"].to_pylist()
        assert found == [b"a", b"b"]
    again = rmq("promote", flight=standby.flight)
    assert "no standby" in again.stderr
    # It remembers its gRPC endpoint, which it did not have at first.
    assert '"grpc": "127.0.0.1:' in (standby.home / "settings.json").read_text()


def test_addresses_without_a_leader_are_told() -> None:
    with (
        Client(f"{free_address()},{free_address()}", retry_s=0.2) as client,
        pytest.raises(StandbyError, match="No broker leads at"),
    ):
        client.send("orders", pa.table({"body": [b"a"]}))


@pytest.mark.parametrize("flight", ["127.0.0.1:1,", "127.0.0.1:1, grpc+tls://127.0.0.1:2"])
def test_wrong_addresses_are_refused(flight: str) -> None:
    done = rmq("lag", flight=flight)

    assert done.returncode != 0
    assert "address" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broker_does_not_listen_at_several_addresses(tmp_path: Path) -> None:
    done = rmq("broker", "--home", str(tmp_path / "home"), flight="127.0.0.1:1,127.0.0.1:2")

    assert done.returncode != 0
    assert "a broker listens at one" in done.stderr
