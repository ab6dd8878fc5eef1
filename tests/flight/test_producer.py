"""Transactions around local work, and producers that are asked about them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline import errors
from rmq_pipeline.broker import Broker
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.flight.transactions import Transaction
from rmq_pipeline.settings import Settings
from rmq_pipeline.transaction import Rollback
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


# ------------------------------------------------------------------------------ the context manager


def test_the_end_of_the_block_commits(client: Client, broker: Broker) -> None:
    with client.transaction("orders", messages(b"a", b"b"), producer_group="p") as begun:
        before = delivered(broker)

    assert before == []
    assert begun.sent["queue_offset"].to_pylist() == [0, 1]
    assert delivered(broker) == [b"a", b"b"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_it_to_the_check(
    client: Client, broker: Broker, error: type[BaseException]
) -> None:
    """The local commit may have been done: its answer may have timed out."""
    with (
        pytest.raises(error),
        client.transaction("orders", messages(b"a"), producer_group="p") as begun,
    ):
        raise error

    assert still_open(broker) == 1
    assert sweep(broker, 1) == 1
    client.end_transactions(
        pa.table({"transaction_id": begun.sent["transaction_id"], "resolution": ["commit"]})
    )
    assert delivered(broker) == [b"a"]


def test_the_check_commits_what_a_timeout_of_the_local_commit_left_open(
    client: Client, broker: Broker, eventually: Eventually
) -> None:
    booked: list[bytes] = []

    def book(body: bytes) -> None:
        booked.append(body)
        raise TimeoutError("the database did not answer")

    def check(halves: pa.Table) -> list[str]:
        return ["commit" if body in booked else "rollback" for body in halves["body"].to_pylist()]

    with client.producer("p", checker=check) as producer:
        with (
            pytest.raises(TimeoutError),
            producer.transaction("orders", messages(b"a")),
        ):
            book(b"a")
        sweep(broker, 1)
        eventually(lambda: still_open(broker) == 0)

    assert delivered(broker) == [b"a"]


def test_an_exception_named_for_it_rolls_back(client: Client, broker: Broker) -> None:
    def work() -> None:
        raise Rollback

    with client.transaction("orders", messages(b"a"), producer_group="p"):
        work()

    assert delivered(broker) == []
    assert still_open(broker) == 0


def test_a_rollback_that_is_raised_is_answered_like_one_that_is_called(
    client: Client, broker: Broker
) -> None:
    def work(begun: Transaction) -> None:
        begun.commit()
        raise Rollback

    with (
        pytest.raises(errors.TransactionEndedError),
        client.transaction("orders", messages(b"a"), producer_group="p") as begun,
    ):
        work(begun)

    assert delivered(broker) == [b"a"]


def test_a_rollback_in_the_block_stands(client: Client, broker: Broker) -> None:
    with client.transaction("orders", messages(b"a"), producer_group="p") as begun:
        begun.rollback()

    assert delivered(broker) == []
    assert still_open(broker) == 0


def test_a_commit_in_the_block_stands_whatever_follows(client: Client, broker: Broker) -> None:
    def work(begun: Transaction) -> None:
        begun.commit()
        raise ValueError("later")

    with (
        pytest.raises(ValueError, match="later"),
        client.transaction("orders", messages(b"a"), producer_group="p") as begun,
    ):
        work(begun)

    assert delivered(broker) == [b"a"]


def test_unknown_leaves_it_to_the_check(client: Client, broker: Broker) -> None:
    with client.transaction("orders", messages(b"a"), producer_group="p") as begun:
        begun.unknown()

    assert still_open(broker) == 1
    assert sweep(broker, 1) == 1


def test_what_is_refused_is_not_begun(client: Client) -> None:
    client.create_topic("plain")

    with (
        pytest.raises(errors.MessageTypeError),
        client.transaction("plain", messages(b"a"), producer_group="p"),
    ):
        pytest.fail("the block must not be entered")


def test_a_broker_that_is_away_leaves_the_rollback_to_the_check(broker: Broker) -> None:
    with FlightServer(broker) as server:
        client = Client(server.address, retry_s=0)

        def work() -> None:
            server.shutdown()
            raise Rollback

        with (
            pytest.raises(errors.BrokerUnavailableError),
            client.transaction("orders", messages(b"a"), producer_group="p"),
        ):
            work()
        client.close()

    assert still_open(broker) == 1


# -------------------------------------------------------------------------------------- the checks


def test_a_producer_answers_the_checks_of_its_group(
    client: Client, broker: Broker, eventually: Eventually
) -> None:
    def check(halves: pa.Table) -> list[str]:
        return ["commit" if body == b"a" else "rollback" for body in halves["body"].to_pylist()]

    client.send_half("orders", messages(b"a", b"b"), producer_group="p")
    with client.producer("p", checker=check):
        sweep(broker, 2)

        eventually(lambda: still_open(broker) == 0)

    assert delivered(broker) == [b"a"]


def test_a_crash_between_the_half_message_and_its_end_is_decided_by_another_producer(
    client: Client, broker: Broker, eventually: Eventually
) -> None:
    begun = client.transaction("orders", messages(b"a"), producer_group="p")
    begun.__enter__()  # and nothing follows

    with client.producer("p", checker=lambda halves: ["commit"] * halves.num_rows):
        sweep(broker, 1)
        eventually(lambda: delivered(broker) == [b"a"])


def test_a_checker_that_raises_is_asked_again(
    client: Client, broker: Broker, eventually: Eventually
) -> None:
    seen: list[int] = []

    def check(halves: pa.Table) -> list[str]:
        seen.extend(halves["checks"].to_pylist())
        if len(seen) == 1:
            raise RuntimeError("no database")
        return ["commit"]

    client.send_half("orders", messages(b"a"), producer_group="p")
    with client.producer("p", checker=check):
        sweep(broker, 1)
        eventually(lambda: seen == [1])
        sweep(broker, 1)

        eventually(lambda: delivered(broker) == [b"a"])

    assert seen == [1, 2]


@pytest.mark.parametrize(
    "said",
    [["commit"], ["commit", "maybe"], [1, 2], pa.table({"resolution": ["commit", "commit"]})],
    ids=["too few", "no resolution", "no texts", "no ids"],
)
def test_an_answer_that_makes_no_sense_ends_nothing(
    client: Client, broker: Broker, eventually: Eventually, said: list[str]
) -> None:
    told = threading.Event()

    def check(_: pa.Table) -> list[str]:
        told.set()
        return said

    client.send_half("orders", messages(b"a", b"b"), producer_group="p")
    with client.producer("p", checker=check):
        sweep(broker, 2)
        eventually(told.is_set)

    assert still_open(broker) == 2


def test_one_that_was_ended_meanwhile_does_not_keep_the_others(
    client: Client, broker: Broker, eventually: Eventually
) -> None:
    halves = client.send_half("orders", messages(b"a", b"b"), producer_group="p")

    def check(checks: pa.Table) -> pa.Table:
        ids = halves["transaction_id"].slice(0, 1)
        broker.end_transactions(pa.table({"transaction_id": ids, "resolution": ["rollback"]}))
        ids = checks["transaction_id"]
        return pa.table({"transaction_id": ids, "resolution": ["commit"] * len(ids)})

    with client.producer("p", checker=check):
        sweep(broker, 2)
        eventually(lambda: delivered(broker) == [b"b"])

    assert still_open(broker) == 0


def test_a_producer_outlives_its_broker(tmp_path: Path, eventually: Eventually) -> None:
    home = tmp_path / "home"
    with Broker.open(home, upkeep="none", settings=QUICK) as broker:
        broker.create_topic("orders", type="transaction", queues=1)
        server = FlightServer(broker, free_address())
        client = Client(server.address, retry_s=0)
        producer = client.producer("p", checker=lambda halves: ["commit"] * halves.num_rows)
        client.send_half("orders", messages(b"a"), producer_group="p")
        address = server.address
        server.shutdown()
    with (
        Broker.open(home, upkeep="none", settings=QUICK) as broker,
        FlightServer(broker, address),
    ):
        sweep(broker, 1)
        eventually(lambda: delivered(broker) == [b"a"])
        producer.close()
        client.close()
