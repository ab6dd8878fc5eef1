"""A broker that goes away, comes back, or comes back elsewhere."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from rmq_pipeline import errors
from rmq_pipeline.broker.work.waiting import LOOK_MS
from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from tests.flight.echo import Echo
from tests.free_address import free_address


def test_many_threads_share_a_client(client: Client) -> None:
    def echoed(number: int) -> bool:
        table = pa.table({"n": [number] * 100})
        return bool(client.send("t", table).equals(table))

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(echoed, range(400)))


def test_call_of_a_closed_client_is_refused(server: FlightServer) -> None:
    client = Client(server.address)
    client.ping()
    client.close()

    with pytest.raises(errors.BrokerUnavailableError, match="closed"):
        client.ping()


class Beginning:
    """A Flight client in which a call has begun, and is not sent yet."""

    def __init__(self, client: flight.FlightClient) -> None:
        self._client = client
        self.has_begun, self.may_send = threading.Event(), threading.Event()
        self.is_closed = False

    def do_exchange(self, *args: Any) -> Any:
        self.has_begun.set()
        assert self.may_send.wait(20)
        return self._client.do_exchange(*args)

    def close(self) -> None:
        self.is_closed = True


def test_closing_lets_a_thread_that_begins_a_call_keep_its_connection(client: Client) -> None:
    # Closed under it, the call would crash the process now and then.
    client.ping()
    channel: Any = client._connection._channel
    used = channel._client = Beginning(channel._client)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.list_topics)
        assert used.has_begun.wait(20)

        client.close()
        used.may_send.set()

        assert isinstance(call.exception(20), errors.BrokerUnavailableError)
    assert not used.is_closed


def test_the_connection_of_a_closed_client_goes_with_its_last_call(
    client: Client, echo: Echo
) -> None:
    client.ping()
    channel: Any = client._connection._channel
    used = weakref.ref(channel._client)
    del channel
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(client.receive, "g", "t", wait_ms=60_000)
        echo.wait_until_waiting(1)

        client.close()

        assert isinstance(poll.exception(20), errors.BrokerUnavailableError)
    del poll  # its error's trace still names the connection
    gc.collect()
    assert used() is None


def test_repeatable_call_waits_for_the_broker_to_come_back(echo: Echo) -> None:
    first = FlightServer(echo, free_address())
    client = Client(first.address, retry_s=20)
    assert client.offset_at("t", 0, at_ms=0) == 1
    first.shutdown()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.offset_at, "t", 0, at_ms=1)
        second = FlightServer(echo, first.address)

        assert call.result(20) == 2
    client.close()
    second.shutdown()


def test_call_that_may_not_be_repeated_fails_at_once(echo: Echo) -> None:
    server = FlightServer(echo)
    with Client(server.address, retry_s=20) as client:
        client.send("t", pa.table({"n": [1]}))
        server.shutdown()

        with pytest.raises(errors.BrokerUnavailableError, match="rmq up"):
            client.send("t", pa.table({"n": [1]}))
        with pytest.raises(errors.BrokerUnavailableError):
            client.settle("g", pa.table({"n": [1]}))


def published(server: FlightServer, home: Path, *, token: str) -> Endpoint:
    endpoint = Endpoint(
        pid=os.getpid(),
        started_at_ms=time.time_ns() // 1_000_000,
        token=token,
        flight=server.address,
        grpc=None,
        home=str(home),
        upkeep="self",
        flush="sync",
    )
    endpoint.write()
    return endpoint


def test_client_finds_the_broker_of_a_home(
    server: FlightServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(server, tmp_path, token="right")
    monkeypatch.delenv("RMQ_FLIGHT", raising=False)
    monkeypatch.setenv("RMQ_HOME", str(tmp_path))

    with Client(home=tmp_path, retry_s=0) as named, Client(retry_s=0) as found:
        assert named.ping() == found.ping() == {"pid": os.getpid()}


def test_client_finds_the_address_in_the_environment(
    server: FlightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RMQ_FLIGHT", server.address)

    with Client(retry_s=0) as client:
        assert client.ping() == {"pid": os.getpid()}


def test_home_without_a_broker_is_unavailable(tmp_path: Path) -> None:
    with (
        Client(home=tmp_path, retry_s=0) as client,
        pytest.raises(errors.BrokerUnavailableError, match="No broker serves"),
    ):
        client.status()


def test_broker_that_comes_back_elsewhere_is_found(echo: Echo, tmp_path: Path) -> None:
    first = FlightServer(echo, token="first")
    published(first, tmp_path, token="first")
    client = Client(home=tmp_path, retry_s=20)
    client.send("t", pa.table({"n": [1]}))
    second = FlightServer(echo, token="second")
    published(second, tmp_path, token="second")
    first.shutdown()

    # Not repeatable: it must go to the new address at the first try.
    assert client.send("t", pa.table({"n": [2]}))["n"].to_pylist() == [2]

    client.close()
    second.shutdown()


def test_address_taken_over_by_another_broker_is_not_used(
    server: FlightServer, tmp_path: Path
) -> None:
    published(server, tmp_path, token="of a broker that died")

    with (
        Client(home=tmp_path, retry_s=0) as client,
        pytest.raises(errors.BrokerUnavailableError, match="Another broker"),
    ):
        client.send("t", pa.table({"n": [1]}))


def test_two_processes_at_once(server: FlightServer, echo: Echo) -> None:
    code = """
import sys, pyarrow as pa
from rmq_pipeline.flight.client import Client
with Client(sys.argv[1]) as client:
    for n in range(200):
        assert client.send(sys.argv[2], pa.table({"n": [n]})).num_rows == 1
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code, server.address, topic]) for topic in "ab"
    ]

    assert [process.wait(60) for process in processes] == [0, 0]
    assert sorted(call[0] for call in echo.calls) == ["a"] * 200 + ["b"] * 200


def test_poll_of_a_killed_process_ends(server: FlightServer, echo: Echo) -> None:
    code = """
import sys
from rmq_pipeline.flight.client import Client
Client(sys.argv[1]).receive("t", "g", wait_ms=60_000)
"""
    process = subprocess.Popen([sys.executable, "-c", code, server.address])
    echo.wait_until_waiting(1)

    process.kill()
    process.wait()

    # The server may hear of it only after some slices; the poll has sixty.
    for _ in range(50):
        echo.clock.advance(LOOK_MS)
        if echo.is_left_alone(within_s=0.1):
            break
    else:
        pytest.fail("the poll goes on")
