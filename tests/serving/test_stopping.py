"""A broker that is told to stop answers its calls before it closes the home."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from rmq_pipeline import errors
from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work.waiting import LOOK_MS
from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.flight import process, wire
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.rocketmq import protocol as pb
from rmq_pipeline.serving.endpoints import Endpoints
from rmq_pipeline.settings import Settings
from tests.conformance import raw
from tests.conformance.raw import Raw
from tests.conftest import Eventually
from tests.free_address import free_endpoints
from tests.rocketmq.consuming import Stand

SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)
LONG_MS = 20_000
MIB = 1 << 20


class Counting:
    """A broker that counts the calls that have come to it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.came: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._broker, name)
        if not inspect.ismethod(found):
            return found

        @functools.wraps(found)
        def counted(*given: Any, **args: Any) -> Any:
            self.came.append(name)
            return found(*given, **args)

        return counted


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path / "home")
    stand.broker.create_topic("t", queues=1)
    stand.broker.create_group("g")
    yield stand
    stand.close()


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.receive("g", "t", wait_ms=LONG_MS),
        lambda client: client.receive("g", "t", wait_ms=LOOK_MS),
        lambda client: client.pull("t", {0: 0}, wait_ms=LONG_MS),
        lambda client: client.fetch_checks(producer_group="p", wait_ms=LONG_MS),
    ],
    ids=["receive", "short receive", "pull", "checks"],
)
def test_a_waiting_call_of_the_flight_endpoint_is_told(
    home: Path, ask: Callable[[Client], Any], eventually: Eventually
) -> None:
    with Broker.open(home, upkeep="none", settings=SMALL) as broker:
        counting = Counting(broker)
        endpoints = Endpoints(FlightServer(counting), None)
        broker.create_topic("t", queues=1)
        broker.create_group("g")
        with Client(endpoints.flight.address, retry_s=0) as client, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, client)
            eventually(lambda: counting.came)

            endpoints.refuse()
            broker.wind_down()
            endpoints.shut()

            with pytest.raises(errors.BrokerUnavailableError, match="is stopping"):
                waiting.result(60)


def test_a_member_is_not_taken_for_dead_by_a_broker_that_stops(
    home: Path, eventually: Eventually
) -> None:
    with Broker.open(home, upkeep="none", settings=SMALL) as broker:
        counting = Counting(broker)
        endpoints = Endpoints(FlightServer(counting), None)
        broker.create_topic("t", queues=1)
        broker.create_group("g", order="queue")
        with Client(endpoints.flight.address, retry_s=0) as client, ThreadPoolExecutor(1) as pool:
            member: dict[str, Any] = {"topics": ["t"], "details": {}}
            version = client.heartbeat("g", "c", **member)["version"]
            client.lock_queues("g", "t", queue_ids=[0], client_id="c", duration_ms=3_600_000)
            waits = {**member, "known_version": version, "wait_ms": LONG_MS}
            waiting = pool.submit(client.heartbeat, "g", "c", **waits)
            eventually(lambda: counting.came.count("heartbeat") == 2)

            endpoints.refuse()
            broker.wind_down()
            with pytest.raises(errors.BrokerUnavailableError, match="is stopping"):
                waiting.result(60)

            known = broker.engine.members._groups["g"].members["c"]
            assert known.cut_off_ms is None
            known.cut_off_ms = 0  # as if its connection had been lost long ago
            broker.engine.members.let_go(broker.engine.submit)
            assert broker.engine.members._groups["g"].members == {"c": known}
            endpoints.shut()


@pytest.mark.parametrize("verb", ["ReceiveMessage", "PullMessage"])
def test_a_waiting_call_of_the_grpc_endpoint_is_told(
    stand: Stand, verb: str, eventually: Eventually
) -> None:
    request = raw.receives("t", "g", wait_ms=LONG_MS)
    if verb == "PullMessage":
        request = pb.PullMessageRequest(
            group=raw.resource("g"), message_queue=request.message_queue, batch_size=1
        )
        raw.at(request.long_polling_timeout, LONG_MS)
    with Raw(stand.endpoint.address) as client:
        waiting = stand.pool.submit(client, verb, request)
        eventually(lambda: stand.waiting() == 1)

        stand.endpoint.refuse()
        stand.broker.wind_down()
        stand.endpoint.shutdown()

        (answer,) = waiting.result(60)
        assert "is stopping" in answer.status.message


def test_what_slow_readers_were_not_given_is_visible_after_a_restart(home: Path) -> None:
    first = process.start(home, listening=free_endpoints())
    try:
        with Client(home=home) as client:
            for topic in ("read", "streamed"):
                client.create_topic(topic, queues=1)
                client.create_group(f"of_{topic}")
                for _ in range(8):
                    client.send(topic, pa.table({"body": [bytes(4 * MIB)] * 4}))
        with contextlib.ExitStack() as stack:
            stack.enter_context(begun_at_flight(first, "read"))
            stack.enter_context(begun_at_grpc(first, "streamed"))

            process.stop(home)

        process.start(home)
        with Client(home=home) as client:
            for topic in ("read", "streamed"):
                got = client.receive(f"of_{topic}", topic, limit=100)
                assert got["delivery_attempt"].to_pylist() == [1] * 32, topic
    finally:
        process.stop(home)


@contextlib.contextmanager
def begun_at_flight(endpoint: Endpoint, topic: str) -> Iterator[None]:
    """Receive all of a topic, and read no more than the beginning of the answer."""
    asked = {"topic": topic, "group": f"of_{topic}", "limit": 100}
    command = wire.request("receive", {**asked, "invisible_duration_ms": 600_000})
    # The client must not take the whole answer: gRPC's window grows with the delay of a connection.
    options = [("grpc.http2.bdp_probe", 0)]
    with flight.FlightClient(f"grpc://{endpoint.flight}", generic_options=options) as client:
        token = (wire.TOKEN.encode(), endpoint.token.encode())
        writer, reader = client.do_exchange(
            flight.FlightDescriptor.for_command(command.command()),
            flight.FlightCallOptions(headers=[token]),
        )
        writer.done_writing()
        assert reader.read_chunk().app_metadata is not None
        yield
        reader.cancel()


@contextlib.contextmanager
def begun_at_grpc(endpoint: Endpoint, topic: str) -> Iterator[None]:
    """The same, as a RocketMQ client."""
    assert endpoint.grpc is not None
    with Raw(endpoint.grpc) as client:
        request = raw.receives(topic, f"of_{topic}", invisible_ms=600_000)
        call = client.stub.ReceiveMessage(request, metadata=client.metadata)
        assert next(call).HasField("status")
        yield
        call.cancel()
