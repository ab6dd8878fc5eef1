"""What is leased to a caller that has gone before it had the answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight
from typing_extensions import override

from rmq_pipeline import errors
from rmq_pipeline.broker import Broker
from rmq_pipeline.flight import wire
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import SLICE_MS, FlightServer
from rmq_pipeline.settings import Settings
from tests.waiting import until

SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)
LONG_MS = 20 * SLICE_MS


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
    """A server that shows the contexts of its calls."""

    def __init__(self, broker: Any) -> None:
        self.contexts: list[flight.ServerCallContext] = []
        super().__init__(broker)

    @override
    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        self.contexts.append(context)
        super().do_exchange(context, descriptor, reader, writer)


class Call:
    """A caller's side of an exchange: it has said all, and reads so many pieces of the answer."""

    def __init__(self, *, reads: int) -> None:
        self._reads = reads

    def read_chunk(self) -> None:
        raise StopIteration

    def begin(self, schema: pa.Schema) -> None:
        """Nothing."""

    def write_with_metadata(self, *_: object) -> None:
        self._reads -= 1
        if self._reads < 0:
            raise pa.ArrowIOError("Could not write record batch to stream.")

    def is_cancelled(self) -> bool:
        return False


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
        call = pool.submit(client.receive, "t", **args)
        assert held.arrived.wait(20)
        client.close()
        with pytest.raises(errors.BrokerUnavailableError):
            call.result(20)
        until(server.contexts[0].is_cancelled)
        held.may_look.set()


@pytest.mark.parametrize("wait_ms", [0, LONG_MS], ids=["at once", "in slices"])
def test_a_receive_whose_caller_has_gone_counts_as_none(broker: Broker, wait_ms: int) -> None:
    broker.send("t", pa.table({"body": [b"a", b"b"]}))

    lose(broker, group="g", wait_ms=wait_ms)

    got = broker.receive("t", "g")
    assert got["body"].to_pylist() == [b"a", b"b"]
    assert got["delivery_attempt"].to_pylist() == [1, 1]


@pytest.mark.parametrize(("reads", "left"), [(0, [b"a"]), (1, [])], ids=["lost", "written"])
def test_a_receive_whose_answer_cannot_be_written_counts_as_none(
    broker: Broker, reads: int, left: list[bytes]
) -> None:
    broker.send("t", pa.table({"body": [b"a"]}))
    asked = wire.request("receive", {"topic": "t", "group": "g"}).command(None)
    call: Any = Call(reads=reads)

    with FlightServer(broker) as server:
        try:
            server.do_exchange(call, flight.FlightDescriptor.for_command(asked), call, call)
        except pa.ArrowIOError:
            assert left

    assert broker.receive("t", "g")["body"].to_pylist() == left


def test_a_lost_receive_with_an_attempt_id_is_answered_again(broker: Broker) -> None:
    broker.send("t", pa.table({"body": [b"a", b"b"]}))

    lose(broker, group="ordered", limit=1, client_id="c", attempt_id="1")

    assert broker.receive("t", "ordered", client_id="d").num_rows == 0
    got = broker.receive("t", "ordered", limit=2, client_id="c", attempt_id="1")
    assert got["body"].to_pylist() == [b"a"]


def test_a_receive_that_is_lost_of_a_locked_queue_leaves_it_to_its_holder(broker: Broker) -> None:
    broker.send("t", pa.table({"body": [b"a"]}))
    mine: dict[str, Any] = {"queue_ids": [0], "client_id": "c"}
    broker.lock_queues("g", "t", **mine)

    lose(broker, group="g", **mine)

    assert broker.receive("t", "g", client_id="d").num_rows == 0
    assert broker.receive("t", "g", **mine)["delivery_attempt"].to_pylist() == [1]


def test_what_ended_before_its_answer_was_lost_is_let_be(broker: Broker) -> None:
    broker.send("t", pa.table({"body": [b"a"]}))

    class Acking(Held):
        def receive(self, **args: Any) -> pa.Table:
            got = super().receive(**args)
            self._broker.ack(got)
            return got

    asked = wire.request("receive", {"topic": "t", "group": "g"}).command(None)
    call: Any = Call(reads=0)
    acking = Acking(broker)
    acking.may_look.set()
    with FlightServer(acking) as server, pytest.raises(pa.ArrowIOError):
        server.do_exchange(call, flight.FlightDescriptor.for_command(asked), call, call)

    assert broker.receive("t", "g").num_rows == 0
