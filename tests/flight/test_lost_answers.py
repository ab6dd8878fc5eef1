"""What is leased to a caller that has gone before it had the answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typing_extensions import override

from rmq_pipeline import errors
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.waiting import LOOK_MS
from rmq_pipeline.flight import framing, wire
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.flight.service import Call
from rmq_pipeline.settings import Settings
from tests.waiting import until

SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)
LONG_MS = 20 * LOOK_MS


class Held:
    """A broker whose receives wait for leave before they look."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.arrived, self.may_look = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def receive(self, **args: Any) -> pa.Table:
        self.arrived.set()
        assert self.may_look.wait(20)
        return self._broker.receive(**args)


class Watched(FlightServer):
    """A server that shows its calls."""

    def __init__(self, broker: Any) -> None:
        self.calls: list[Call] = []
        super().__init__(broker)

    @override
    def exchange(self, call: Call) -> Iterator[bytes]:
        self.calls.append(call)
        yield from super().exchange(call)


class Caller:
    """A caller's side of a call without tables."""

    def __init__(self, command: bytes) -> None:
        self.headers: dict[str, str] = {}
        self.messages = iter([framing.Message(command, None)])
        self.peer = ""
        self.is_action = False
        self.is_there = True

    def read(self, timeout_s: float) -> framing.Message | None:
        del timeout_s
        return next(self.messages, None)

    def is_active(self) -> bool:
        return self.is_there


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "home", upkeep="none", settings=SMALL) as broker:
        broker.create_topic("t", queues=1)
        broker.create_group("g")
        broker.create_group("ordered", order="queue")
        yield broker


def lose(broker: Broker, **args: Any) -> None:
    """Receive, and be gone before anything is looked for."""
    held = Held(broker)
    with Watched(held) as server, ThreadPoolExecutor(1) as pool:
        client = Client(server.address, retry_s=0)
        call = pool.submit(client.receive, topic="t", **args)
        assert held.arrived.wait(20)
        client.close()
        with pytest.raises(errors.BrokerUnavailableError):
            call.result(20)
        until(lambda: not server.calls[0].is_active())
        held.may_look.set()


@pytest.mark.parametrize("wait_ms", [0, LONG_MS], ids=["at once", "in slices"])
def test_a_receive_whose_caller_has_gone_counts_as_none(broker: Broker, wait_ms: int) -> None:
    broker.send("t", pa.table({"body": [b"a", b"b"]}))

    lose(broker, group="g", wait_ms=wait_ms)

    got = broker.receive("g", "t")
    assert got["body"].to_pylist() == [b"a", b"b"]
    assert got["delivery_attempt"].to_pylist() == [1, 1]


@pytest.mark.parametrize(("reads", "left"), [(0, [b"a"]), (1, [])], ids=["lost", "written"])
def test_a_receive_whose_answer_cannot_be_written_counts_as_none(
    broker: Broker, reads: int, left: list[bytes]
) -> None:
    broker.send("t", pa.table({"body": [b"a"]}))
    asked = wire.request("receive", {"topic": "t", "group": "g"}).command()

    with FlightServer(broker) as server:
        answer = server.exchange(Caller(asked))
        assert next(answer)
        if reads:
            assert list(answer) == []
        else:
            answer.close()  # type: ignore[attr-defined]

    assert broker.receive("g", "t")["body"].to_pylist() == left


def test_a_receive_whose_caller_goes_while_its_answer_is_written_counts_as_none(
    broker: Broker,
) -> None:
    broker.send("t", pa.table({"body": [b"a"]}))
    caller = Caller(wire.request("receive", {"topic": "t", "group": "g"}).command())

    with FlightServer(broker) as server:
        answer = server.exchange(caller)
        assert next(answer)
        caller.is_there = False
        list(answer)

    assert broker.receive("g", "t")["delivery_attempt"].to_pylist() == [1]


def test_a_lost_receive_with_an_attempt_id_is_answered_again(broker: Broker) -> None:
    broker.send("t", pa.table({"body": [b"a", b"b"]}))

    lose(broker, group="ordered", limit=1, client_id="c", attempt_id="1")

    assert broker.receive("ordered", "t", client_id="d").num_rows == 0
    got = broker.receive("ordered", "t", limit=2, client_id="c", attempt_id="1")
    assert got["body"].to_pylist() == [b"a"]


def test_a_receive_that_is_lost_of_a_locked_queue_leaves_it_to_its_holder(broker: Broker) -> None:
    broker.send("t", pa.table({"body": [b"a"]}))
    mine: dict[str, Any] = {"queue_ids": [0], "client_id": "c"}
    broker.lock_queues("g", "t", **mine)

    lose(broker, group="g", **mine)

    assert broker.receive("g", "t", client_id="d").num_rows == 0
    assert broker.receive("g", "t", **mine)["delivery_attempt"].to_pylist() == [1]


def test_what_ended_before_its_answer_was_lost_is_let_be(broker: Broker) -> None:
    broker.send("t", pa.table({"body": [b"a"]}))

    class Acking(Held):
        def receive(self, **args: Any) -> pa.Table:
            got = super().receive(**args)
            self._broker.ack(got)
            return got

    asked = wire.request("receive", {"topic": "t", "group": "g"}).command()
    acking = Acking(broker)
    acking.may_look.set()
    with FlightServer(acking) as server:
        answer = server.exchange(Caller(asked))
        assert next(answer)
        answer.close()  # type: ignore[attr-defined]

    assert broker.receive("g", "t").num_rows == 0


def test_what_is_leased_after_the_others_were_released_is_released_too(broker: Broker) -> None:
    broker.send("t", pa.table({"body": [b"a"]}))
    asked = wire.request("receive", {"topic": "t", "group": "g"}).command()
    with FlightServer(broker) as server:
        server.take_back()

        with pytest.raises(errors.BrokerUnavailableError, match="is stopping"):
            next(server.exchange(Caller(asked)))

    assert broker.receive("g", "t")["delivery_attempt"].to_pylist() == [1]


@pytest.mark.parametrize("wait_ms", [0, 1_000])
def test_a_receive_leases_nothing_once_the_broker_stops(broker: Broker, wait_ms: int) -> None:
    broker.send("t", pa.table({"body": [b"a"]}))

    broker.wind_down()

    assert broker.receive("g", "t", wait_ms=wait_ms).num_rows == 0
    assert broker.sql("SELECT * FROM in_flight").num_rows == 0
