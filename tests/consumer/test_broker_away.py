"""Consumers outlive their broker: what they are in the middle of goes on when it is back."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.message_queue import queues_of
from rmq_pipeline.consumer.pull_consumer import PullConsumer
from rmq_pipeline.errors import BrokerUnavailableError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from tests.consumer.conftest import FAST, SMALL, bodies
from tests.free_address import free_address
from tests.waiting import until


class House:
    """A home whose broker comes back at the same address."""

    def __init__(self, home: Path) -> None:
        self._home, self.address = home, free_address()
        self._stack = ExitStack()
        self.open()

    def open(self) -> None:
        self.broker = self._stack.enter_context(
            Broker.open(self._home, upkeep="none", settings=SMALL)
        )
        self._stack.enter_context(FlightServer(self.broker, self.address))

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path / "home")
    house.broker.create_topic("orders", queues=4)
    house.broker.create_group("readers")
    yield house
    house.close()


def test_members_go_on_with_the_queues_they_had(house: House) -> None:
    with (
        Client(house.address, retry_s=0.2) as client,
        PullConsumer(client, "readers", start_from="first", pace=FAST, client_id="a") as one,
        PullConsumer(client, "readers", start_from="first", pace=FAST, client_id="b") as other,
    ):
        for consumer in (one, other):
            consumer.subscribe("orders")
        until(lambda: (len(one.assignment()), len(other.assignment())) == (2, 2))
        before = one.assignment()
        house.broker.send("orders", bodies(0, 40))
        found = _all(40, one, other)

        house.close()
        assert one.poll(0.1).num_rows == 0, "nothing comes, and nothing is wrong"
        house.open()
        house.broker.send("orders", bodies(40, 80))

        found += _all(40, one, other)
        assert sorted(found) == list(range(80))
        until(lambda: one.assignment() == before, what="the queues it had before")


def test_a_commit_that_failed_is_repeated(house: House) -> None:
    with Client(house.address, retry_s=0.2) as client:
        consumer = PullConsumer(
            client, "readers", start_from="first", pace=FAST, auto_commit_ms=None
        )
        with consumer.assign(queues_of("orders", 1)):
            house.broker.send("orders", bodies(0, 4))
            queue = queues_of("orders", 1)[0]
            assert len(_all(1, consumer)) == 1
            house.close()
            with pytest.raises(BrokerUnavailableError):
                consumer.commit()

            house.open()

            assert consumer.commit() == {queue: 1}
            assert house.broker.start_offsets("readers", "orders", where="last")[0] == 1


def test_a_consumer_closes_while_no_broker_answers(house: House) -> None:
    with Client(house.address, retry_s=0.05) as client:
        consumer = PullConsumer(client, "readers", pace=FAST).subscribe("orders")
        until(lambda: len(consumer.assignment()) == 4)
        house.close()

        closing = threading.Thread(target=consumer.close)
        closing.start()

        closing.join(30)
        assert not closing.is_alive()
        house.open()


def _all(count: int, *consumers: PullConsumer) -> list[int]:
    """So many messages of these consumers."""
    found: list[int] = []

    def poll() -> bool:
        for consumer in consumers:
            found.extend(int(body) for body in consumer.poll(0.02)["body"].to_pylist())
        return len(found) >= count

    until(poll)
    return found
