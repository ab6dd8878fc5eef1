"""Small calls over plain TCP: the answers, rights and limits of the Flight endpoint."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import errors
from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.access.source import address_of
from rmq_pipeline.broker import Broker
from rmq_pipeline.flight import framing, wire
from rmq_pipeline.flight.channel import SMALL_CALLS
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.flight.tcp_service import _peer
from rmq_pipeline.flight.tcp_stream import (
    BODY_BYTES,
    COMMAND_BYTES,
    HEADERS_BYTES,
    KEY_BYTES,
    LENGTH,
    LENGTHS,
    MAGIC,
    Stream,
)
from rmq_pipeline.limits import FlightLimits
from rmq_pipeline.settings import Settings
from tests.flight.echo import Echo
from tests.waiting import until

ONE = pa.table({"body": [b"x"]})
TOKEN = {wire.TOKEN: "right"}


def warm(client: Client) -> None:
    """Make as many small calls as it takes until the client asks for plain connections."""
    for _ in range(SMALL_CALLS + 1):
        client.ping()


def connections(server: FlightServer) -> list[Stream]:
    assert server._tcp is not None
    return list(server._tcp._open)


@contextmanager
def raw(server: FlightServer, headers: Any = TOKEN) -> Iterator[Stream]:
    """A connection made byte by byte; its headers are sent, and their answer not read yet."""
    assert server._tcp is not None
    said = headers if isinstance(headers, bytes) else json.dumps(headers).encode()
    key = server._tcp._key
    with socket.create_connection(("127.0.0.1", server._tcp.port), timeout=20) as connected:
        stream = Stream(connected)
        stream.write(MAGIC, key[: KEY_BYTES // 2])
        assert stream.read(KEY_BYTES // 2) == key[KEY_BYTES // 2 :]
        stream.write(LENGTH.pack(len(said)), said)
        yield stream


def _port(server: FlightServer) -> int:
    assert server._tcp is not None
    return server._tcp.port


def answer(stream: Stream) -> list[bytes]:
    pieces = []
    while size := LENGTH.unpack(stream.read(LENGTH.size))[0]:
        pieces.append(stream.read(size))
    return pieces


def ended(stream: Stream) -> bool:
    """Return True if nothing more comes."""
    try:
        return not stream.read_some(1)
    except (EOFError, ConnectionError):
        return True


def say(stream: Stream, verb: str, args: dict[str, Any], *parts: framing.Part) -> None:
    lengths = [(name, data.size) for name, data in parts]
    command = json.dumps({"verb": verb, "args": args, "parts": lengths}).encode()
    body = [data for _, data in parts]
    stream.write(LENGTHS.pack(len(command), sum(data.size for data in body)), command, *body)


def test_small_calls_take_one_connection_after_some(client: Client, server: FlightServer) -> None:
    for _ in range(SMALL_CALLS - 1):
        client.ping()
    before = len(connections(server))
    warm(client)

    assert before == 0
    assert len(connections(server)) == 1
    assert client.send("t", ONE).equals(ONE)
    assert client.offset_at("t", 2, at_ms=40) == 43
    assert client.keyed_state("g", "t", message_groups=ONE) == ONE
    assert client.keyed_state("g", "t") is None
    assert len(connections(server)) == 1


def test_large_calls_do_not(client: Client, server: FlightServer) -> None:
    warm(client)
    assert server._tcp is not None
    server._tcp._exchange = None  # type: ignore[assignment] # whoever calls it fails

    large = pa.table({"body": [bytes(BODY_BYTES)]})
    assert client.send("t", large).num_rows == 1
    assert client.create_group("g" * COMMAND_BYTES)["name"] == "g" * COMMAND_BYTES


def test_refusals_are_those_of_flight_and_the_connection_goes_on(
    client: Client, server: FlightServer
) -> None:
    warm(client)
    long = "x" * 50_000

    with pytest.raises(errors.TopicNotFoundError, match=r"No topic refused\."):
        client.send("refused", ONE)
    with pytest.raises(errors.RocketMQError, match="ZeroDivisionError"):
        client.send("broken", ONE)
    with pytest.raises(errors.QueryError) as refused:
        client.sql(long)
    assert long in refused.value.message  # a status of gRPC would be cut
    assert client.send("t", ONE).num_rows == 1
    assert len(connections(server)) == 1


def test_calls_of_several_threads_take_a_connection_each(
    client: Client, server: FlightServer, echo: Echo
) -> None:
    warm(client)
    with ThreadPoolExecutor(3) as pool:
        polls = [pool.submit(client.receive, "g", "t", wait_ms=60_000) for _ in range(3)]
        echo.wait_until_waiting(3)
        assert client.send("t", ONE).num_rows == 1

        echo.deliver(ONE)

        assert [poll.result(20).num_rows for poll in polls] == [1, 1, 1]
    assert len(connections(server)) == 4


def test_a_closed_client_cancels_its_waiting_calls(
    client: Client, server: FlightServer, echo: Echo
) -> None:
    warm(client)
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(client.receive, "g", "t", wait_ms=60_000)
        echo.wait_until_waiting(1)

        client.close()

        assert isinstance(poll.exception(20), errors.BrokerUnavailableError)
    echo.clock.advance(1_000)  # the broker looks for its caller once a second
    echo.wait_until_waiting(0)
    until(lambda: not connections(server))


def test_a_client_that_is_forgotten_leaves_no_connection(server: FlightServer) -> None:
    client = Client(server.address, retry_s=0)
    warm(client)
    assert len(connections(server)) == 1

    del client

    until(lambda: not connections(server))


def test_a_connection_that_the_broker_closed_is_not_used_again(
    client: Client, server: FlightServer
) -> None:
    warm(client)
    (old,) = connections(server)
    old.end()

    # A send is not repeatable: it would raise if it had been written to the closed connection.
    until(lambda: not connections(server))
    assert client.send("t", ONE).num_rows == 1
    assert old not in connections(server)


def test_a_port_that_cannot_be_reached_is_left_alone(client: Client, server: FlightServer) -> None:
    assert server._tcp is not None
    server._tcp.stop()
    warm(client)

    assert client.send("t", ONE).num_rows == 1
    assert not connections(server)


def test_a_broker_that_was_too_busy_is_asked_again(
    client: Client, server: FlightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_pipeline.flight.tcp_service.CONNECTIONS", 0)
    warm(client)
    assert not connections(server)
    monkeypatch.setattr("rmq_pipeline.flight.tcp_service.CONNECTIONS", 1)
    client.ping()
    assert not connections(server)  # not yet

    channel: Any = client._connection._channel
    channel._ask_from_s = 0.0
    client.ping()

    assert len(connections(server)) == 1


def test_another_broker_at_the_port_gets_neither_calls_nor_headers(echo: Echo) -> None:
    # As behind a tunnel that forwards the port of Flight only.
    other = Echo()
    with (
        FlightServer(echo) as server,
        FlightServer(other) as wrong,
        Client(server.address) as client,
    ):
        assert server._tcp is not None
        assert wrong._tcp is not None
        server._tcp.port = wrong._tcp.port
        warm(client)

        assert client.send("t", ONE).num_rows == 1
        assert len(echo.calls) == 1
        assert not other.calls


def test_a_forked_process_has_connections_of_its_own(client: Client, server: FlightServer) -> None:
    warm(client)
    (mine,) = connections(server)
    channel: Any = client._connection._channel

    if (child := os.fork()) == 0:
        # Ends without pytest's own end; gRPC's part of a client does not outlive a fork.
        try:
            request = wire.request("offset_at", {"topic": "t", "queue_id": 1, "at_ms": 2})
            told = channel._tcp.call(request.command(), [], timeout_s=20, is_quick=True)
            right = wire.read_answer(told) == 4
            channel._tcp.close()
            os._exit(0 if right else 1)
        except BaseException:  # noqa: BLE001 - nothing of the test may go on in the child
            os._exit(2)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert client.ping()["pid"] == os.getpid()
    assert connections(server) == [mine]


def test_a_broker_without_the_port(echo: Echo) -> None:
    with FlightServer(echo, tcp_port=None) as server, Client(server.address) as client:
        warm(client)
        assert client.send("t", ONE).num_rows == 1


def test_a_port_that_is_taken_is_refused(server: FlightServer, echo: Echo) -> None:
    assert server._tcp is not None
    says = rf"in use by process {os.getpid()} .*Choose another tcp_port\."
    with pytest.raises(errors.RequestError, match=says):
        FlightServer(echo, tcp_port=server._tcp.port)


def test_a_broker_that_stops_ends_waiting_calls_and_idle_connections(echo: Echo) -> None:
    server = FlightServer(echo)
    with Client(server.address, retry_s=0) as client, ThreadPoolExecutor(1) as pool:
        warm(client)
        poll = pool.submit(client.receive, "g", "t", wait_ms=60_000)
        echo.wait_until_waiting(1)
        client.ping()
        assert len(connections(server)) == 2

        server.refuse()
        echo.clock.advance(1_000)
        server.shutdown()

        assert isinstance(poll.exception(20), errors.BrokerUnavailableError)
        assert not connections(server)


def test_connections_are_encrypted_as_flight_is(echo: Echo, tmp_path: Path) -> None:
    made = Certificate.self_made(tmp_path)
    with FlightServer(echo, certificate=made) as server:
        port = server.address.rpartition(":")[2]
        address = f"grpc+tls://{made.name}:{port}"
        with Client(address, certificate=made.path, retry_s=0) as client:
            warm(client)
            assert client.send("t", ONE).equals(ONE)
            big = pa.table({"body": [bytes(500_000)]})
            assert client.send("t", big).equals(big)
            (stream,) = connections(server)
            assert stream.is_open()
        until(lambda: not connections(server))
        # Nothing in clear is answered.
        assert server._tcp is not None
        with socket.create_connection(("127.0.0.1", server._tcp.port), timeout=20) as plain:
            plain.sendall(MAGIC + server._tcp._key)
            assert ended(Stream(plain))


# ------------------------------------------------------------------------- callers without rights


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({wire.TOKEN: "wrong"}, id="wrong token"),
        pytest.param(b"[]", id="no object"),
        pytest.param(b"{", id="no JSON"),
        pytest.param({wire.TOKEN: 1}, id="no text"),
        pytest.param({wire.TOKEN: "\ud800"}, id="not ASCII"),
        pytest.param(b"[" * HEADERS_BYTES, id="deep"),
    ],
)
def test_a_greeting_without_rights_is_refused(server: FlightServer, headers: Any) -> None:
    with raw(server, headers) as stream:
        say(stream, "ping", {})
        (refusal,) = answer(stream)

        with pytest.raises(errors.RocketMQError):
            wire.read_answer([pa.py_buffer(refusal)])
        assert ended(stream)
    until(lambda: not connections(server))


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        MAGIC + bytes(KEY_BYTES),
    ],
)
def test_what_is_no_greeting_ends(server: FlightServer, greeting: bytes) -> None:
    with socket.create_connection(("127.0.0.1", _port(server)), timeout=20) as connected:
        connected.sendall(greeting)
        assert ended(Stream(connected))
    until(lambda: not connections(server))


def test_a_greeting_that_does_not_come_ends(echo: Echo) -> None:
    with (
        FlightServer(echo, allowed=FlightLimits(silent_s=0.2)) as server,
        socket.create_connection(("127.0.0.1", _port(server)), timeout=20) as connected,
    ):
        connected.sendall(MAGIC)
        assert ended(Stream(connected))


@pytest.mark.parametrize(
    ("address", "host"),
    [(("10.1.2.3", 99), "10.1.2.3"), (("fe80::1", 99, 0, 0), "fe80::1")],
)
def test_access_rules_by_address_know_the_caller(address: Any, host: str) -> None:
    assert address_of(_peer(address)) == host


# ---------------------------------------------------------------------------------- broken callers


@pytest.mark.parametrize("sizes", [(COMMAND_BYTES + 1, 0), (2, BODY_BYTES + 1), (2**32 - 1, 9)])
def test_sizes_beyond_the_limits_are_refused_unread(
    server: FlightServer, sizes: tuple[int, int]
) -> None:
    with raw(server) as stream:
        assert answer(stream) == []
        stream.write(LENGTHS.pack(*sizes))
        (refusal,) = answer(stream)

        with pytest.raises(errors.RequestError, match="through gRPC"):
            wire.read_answer([pa.py_buffer(refusal)])
        assert ended(stream)


def test_a_command_that_trickles_in_is_refused_in_time(echo: Echo) -> None:
    with (
        FlightServer(echo, allowed=FlightLimits(silent_s=0.3)) as server,
        raw(server, {}) as stream,
    ):
        assert answer(stream) == []
        stream.write(LENGTHS.pack(16, 0), b'{"')

        with pytest.raises(errors.RequestError, match="gone before the call was complete"):
            wire.read_answer([pa.py_buffer(each) for each in answer(stream)])
        assert ended(stream)
    assert not echo.calls


def test_a_call_that_is_refused_before_its_body_leaves_the_connection_usable(
    server: FlightServer, echo: Echo
) -> None:
    table = framing.pack(pa.table({"body": [bytes(300_000)]}))
    with raw(server) as stream:
        assert answer(stream) == []
        for _ in range(3):
            say(stream, "no_such_verb", {}, ("messages", table))
            with pytest.raises(errors.RequestError, match="no verb"):
                wire.read_answer([pa.py_buffer(each) for each in answer(stream)])
        say(stream, "send", {"topic": "t"}, ("messages", framing.pack(ONE)))

        assert wire.read_answer([pa.py_buffer(each) for each in answer(stream)]).equals(ONE)
    assert len(echo.calls) == 1


@pytest.mark.parametrize("body", [b"", b"\0" * 9])
def test_a_body_of_another_length_than_its_command_says_is_refused(
    server: FlightServer, echo: Echo, body: bytes
) -> None:
    said = {"verb": "send", "args": {"topic": "t"}, "parts": [["messages", 5]]}
    command = json.dumps(said).encode()
    with raw(server) as stream:
        assert answer(stream) == []
        stream.write(LENGTHS.pack(len(command), len(body)), command, body)
        (refusal,) = answer(stream)

        with pytest.raises(errors.RequestError, match="bytes"):
            wire.read_answer([pa.py_buffer(refusal)])
    assert not echo.calls


def test_a_body_that_stops_is_refused_and_frees_its_memory(echo: Echo) -> None:
    with (
        FlightServer(echo, allowed=FlightLimits(silent_s=0.3)) as server,
        raw(server, {}) as stream,
    ):
        assert answer(stream) == []
        said = {"verb": "send", "args": {"topic": "t"}, "parts": [["messages", 200_000]]}
        command = json.dumps(said).encode()
        stream.write(LENGTHS.pack(len(command), 200_000), command, b"x")
        (refusal,) = answer(stream)

        with pytest.raises(errors.RequestError, match="then nothing for"):
            wire.read_answer([pa.py_buffer(refusal)])
        assert ended(stream)
        until(lambda: server._room._held == 0)


def test_connections_have_a_limit(
    server: FlightServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rmq_pipeline.flight.tcp_service.CONNECTIONS", 1)
    with raw(server) as first:
        assert answer(first) == []
        with socket.create_connection(("127.0.0.1", _port(server)), timeout=20) as second:
            assert ended(Stream(second))
        warm(client)  # goes on through Flight

        say(first, "ping", {})
        assert len(answer(first)) == 1


@pytest.mark.parametrize("reads", [False, True])
def test_messages_leased_to_a_caller_that_has_gone_are_released(home: Path, reads: bool) -> None:
    with Broker.open(home, upkeep="none", settings=Settings(reserve_bytes=1 << 20)) as broker:
        broker.create_topic("orders", queues=1)
        broker.create_group("billing")
        args = {"group": "billing", "topic": "orders", "limit": 1, "wait_ms": 60_000}
        with FlightServer(broker, token="right") as server:
            with raw(server) as stream:
                assert answer(stream) == []
                say(stream, "receive", args)
                until(lambda: len(broker.engine.wakeups) == 1)
                if reads:
                    broker.send("orders", ONE)
                    assert wire.read_answer(list(map(pa.py_buffer, answer(stream)))).num_rows == 1
            until(lambda: not connections(server), within_s=20)
            if not reads:
                broker.send("orders", ONE)

            again = broker.receive("billing", "orders", limit=1)

            # An answer that was read is leased; one that nobody was there to read is not.
            assert again.num_rows == (0 if reads else 1)
