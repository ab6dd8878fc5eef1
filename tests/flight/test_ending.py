"""Ends of transactions that are refused, or whose answer gets lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typing_extensions import override

from rmq_pipeline import errors
from rmq_pipeline.broker import Broker
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.flight.transactions import end_all
from rmq_pipeline.settings import Settings

SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)


class Refused(Client):
    """A client whose first ends are answered with an error; it keeps what was asked for."""

    def __init__(self, address: str, *, error: errors.RocketMQError, times: int = 1) -> None:
        super().__init__(address, retry_s=0)
        self._error, self._times = error, times
        self.asked: list[list[str]] = []

    @override
    def end_transactions(self, resolutions: pa.Table, **rest: Any) -> pa.Table:
        self.asked.append(resolutions["resolution"].to_pylist())
        if len(self.asked) <= self._times:
            raise self._error
        return super().end_transactions(resolutions, **rest)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "home", upkeep="none", settings=SMALL) as broker:
        broker.create_topic("orders", type="transaction", queues=1)
        yield broker


@pytest.fixture
def server(broker: Broker) -> Iterator[FlightServer]:
    with FlightServer(broker) as server:
        yield server


def messages(*bodies: bytes) -> pa.Table:
    return pa.table({"body": list(bodies)})


def delivered(broker: Broker) -> list[bytes]:
    found: list[bytes] = broker.read("orders", 0, offset=0, limit=100)["body"].to_pylist()
    return found


def still_open(broker: Broker) -> int:
    return int(broker.sql("FROM half").num_rows)


def test_a_commit_in_the_block_whose_answer_gets_lost_is_left_to_the_check(
    server: FlightServer, broker: Broker
) -> None:
    lost = errors.BrokerUnavailableError("away")
    with (
        Refused(server.address, error=lost) as client,
        pytest.raises(errors.BrokerUnavailableError),
        client.transaction("orders", messages(b"a"), producer_group="p") as begun,
    ):
        begun.commit()

    assert client.asked == [["commit"]]
    assert still_open(broker) == 1


def test_a_commit_at_the_end_of_the_block_whose_answer_gets_lost_is_left_to_the_check(
    server: FlightServer, broker: Broker
) -> None:
    lost = errors.BrokerUnavailableError("away")
    with (
        Refused(server.address, error=lost) as client,
        pytest.raises(errors.BrokerUnavailableError),
        client.transaction("orders", messages(b"a"), producer_group="p"),
    ):
        pass

    assert client.asked == [["commit"]]
    assert still_open(broker) == 1


def test_a_commit_that_is_refused_in_the_block_is_followed_by_no_rollback(
    server: FlightServer,
) -> None:
    ended = errors.TransactionEndedError("It was rolled back.")
    with (
        Refused(server.address, error=ended) as client,
        pytest.raises(errors.TransactionEndedError),
        client.transaction("orders", messages(b"a"), producer_group="p") as begun,
    ):
        begun.commit()

    assert client.asked == [["commit"]]


def test_a_commit_whose_answer_gets_lost_can_be_made_again_in_the_block(
    server: FlightServer, broker: Broker
) -> None:
    lost = errors.BrokerUnavailableError("away")
    with (
        Refused(server.address, error=lost) as client,
        client.transaction("orders", messages(b"a"), producer_group="p") as begun,
    ):
        with pytest.raises(errors.BrokerUnavailableError):
            begun.commit()
        begun.commit()

    assert client.asked == [["commit"]] * 2
    assert delivered(broker) == [b"a"]


def commits(client: Client, *bodies: bytes) -> pa.Table:
    ids = client.send_half("orders", messages(*bodies), producer_group="p")["transaction_id"]
    return pa.table({"transaction_id": ids, "resolution": ["commit"] * len(ids)})


@pytest.mark.parametrize(
    "error",
    [
        errors.StoreFullError("The disk is full."),
        errors.StorageError("The broker's store has failed."),
        errors.DispatchBehindError("Dispatch is behind."),
        errors.FencedError("A newer window has taken over."),
        errors.UnauthorizedError("The password is not right."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_checks_that_none_can_be_answered_now_are_one_call(
    server: FlightServer, broker: Broker, error: errors.RocketMQError
) -> None:
    with Refused(server.address, error=error, times=100) as client:
        said = commits(client, b"a", b"b", b"c", b"d")

        with pytest.raises(type(error)):
            end_all(client, said)

    assert len(client.asked) == 1
    assert still_open(broker) == 4


def test_checks_of_which_one_is_at_fault_are_answered_but_for_it(
    server: FlightServer, broker: Broker
) -> None:
    with Client(server.address, retry_s=0) as client:
        said = commits(client, b"a", b"b", b"c", b"d")
        ended = pa.table(
            {"transaction_id": said["transaction_id"][1:2], "resolution": ["rollback"]}
        )
        client.end_transactions(ended)

        assert end_all(client, said) == 1

    assert delivered(broker) == [b"a", b"c", b"d"]
