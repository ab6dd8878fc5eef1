"""What a caller sends is bounded before it is opened."""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from rmq_pipeline import errors, limits
from rmq_pipeline.flight import framing, wire
from rmq_pipeline.flight import service as service_module
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.flight.service import Intake, Room
from rmq_pipeline.limits import FlightLimits
from tests.flight.echo import Echo
from tests.flight.exchange import message, refusal
from tests.waiting import until

SEND = {"verb": "send", "args": {"topic": "t"}, "token": "right"}
TABLE = pa.table({"body": [b"x" * 100_000] * 20})


class Said:
    """A call whose messages are all there."""

    def __init__(self, messages: Iterable[framing.Message]) -> None:
        self.messages = iter(messages)

    def read(self, timeout_s: float) -> framing.Message | None:
        del timeout_s
        return next(self.messages, None)


def intake(*messages: bytes) -> Intake:
    return Intake(Said(map(framing.read_message, messages)), silent_s=10.0)


def stream(table: pa.Table, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("table", [TABLE, pa.table({"d": TABLE["body"].dictionary_encode()})])
def test_a_compressed_table_is_refused_before_it_is_unpacked(
    server: FlightServer, echo: Echo, compression: str, table: pa.Table
) -> None:
    refused = refusal(server.address, SEND, [("messages", stream(table, compression))])

    assert isinstance(refused, errors.TableSchemaError)
    assert "compressed" in refused.message
    assert not echo.calls


@pytest.mark.parametrize("damage", [b"", b"no stream", stream(TABLE)[:50], stream(TABLE)[:-40_000]])
def test_what_is_no_stream_is_refused(server: FlightServer, echo: Echo, damage: bytes) -> None:
    refused = refusal(server.address, SEND, [("messages", damage)])

    assert isinstance(refused, errors.TableSchemaError)
    assert not echo.calls


def test_an_older_client_is_told_so(server: FlightServer) -> None:
    refused = refusal(server.address, b'{"verb":"ping","args":{},"token":null}')

    assert isinstance(refused, errors.RequestError)
    assert "older version" in refused.message


@pytest.mark.parametrize(
    "parts", [7, {}, [7], [["messages"]], [["messages", -1]], [["messages", True]], [[7, 7]]]
)
def test_parts_are_names_and_lengths(server: FlightServer, parts: Any) -> None:
    refused = refusal(server.address, {**SEND, "parts": parts})

    assert isinstance(refused, errors.RequestError)
    assert "pairs of name and length" in refused.message


@pytest.mark.parametrize(
    ("sent", "expected", "said"),
    [(1_000, 999, "sends more than the 999"), (1_000, 1_001, "after 1000 of the 1001")],
)
def test_a_call_sends_what_it_says(sent: int, expected: int, said: str) -> None:
    call = intake(message(b"{}"), framing.write_message(bytes(sent)))
    assert call.command() == b"{}"
    call.expect(expected)

    with pytest.raises(errors.RequestError, match=said):
        call.body()


@pytest.mark.parametrize("body", [b"\x12\x01x", b"\x12\x04\x01\0\0\0", b"\x12\x05\x02\0\0\0x"])
def test_what_is_no_action_is_refused(body: bytes) -> None:
    with pytest.raises(errors.RequestError, match="not an action"):
        framing.read_action(b"\x0a\x04call" + body)


def test_an_action_of_another_type_is_left_to_flight_sql() -> None:
    with pytest.raises(framing.ForeignAction) as found:
        framing.read_action(b"\x0a\x03any\x12\x01x")

    assert (found.value.kind, found.value.body) == ("any", b"x")


def test_an_action_says_all_at_once() -> None:
    said = framing.action(b"c", [("m", pa.py_buffer(b"12")), ("n", pa.py_buffer(b"3"))])
    found = framing.read_action(b"\x0a\x04call\x12" + bytes([len(said)]) + said)
    assert found.data is not None
    assert (found.command, bytes(found.data)) == (b"c", b"123")

    call = Intake(Said([found]), silent_s=10.0)
    assert call.command() == b"c"
    with pytest.raises(errors.RequestError, match="more than the 2"):
        call.expect(2)
    call.expect(3)
    assert call.body().to_pybytes() == b"123"


@pytest.mark.parametrize("slices", [[], [5], [3, 2], [1] * 7, [0, 4, 0]])
def test_a_body_is_what_its_slices_say(slices: list[int]) -> None:
    data = [bytes([number]) * size for number, size in enumerate(slices, start=1)]
    whole = b"".join(data)
    call = intake(message(b"c"), *map(framing.write_message, data))

    assert call.command() == b"c"
    call.expect(len(whole))
    assert call.body().to_pybytes() == whole
    assert call.is_over


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\x0a",
        b"\x0a\x7f",
        b"\xff" * 12,
        b"\x0b\x01",
        framing.write_message(b"x"),
        message(b"c") + b"\x12\x01x",
        message(b"c") + b"\xc2\x3e\x01x",
    ],
)
def test_what_is_no_message_is_refused(damage: bytes) -> None:
    with pytest.raises(errors.RequestError, match="message"):
        intake(damage).command()


def test_parts_cross_in_slices() -> None:
    parts = [
        ("a", pa.py_buffer(b"x" * 333)),
        ("ü" * 70, pa.py_buffer(b"")),
        ("c", pa.py_buffer(b"1")),
    ]

    slices = list(framing.body(parts, slice_bytes=100))
    whole = pa.py_buffer(b"".join(slices))
    back = framing.cut(whole, [(name, data.size) for name, data in parts])

    assert [slice_.size for slice_ in slices] == [100, 100, 100, 34]
    assert [(name, data.to_pybytes()) for name, data in back] == [
        (name, data.to_pybytes()) for name, data in parts
    ]


@contextmanager
def served(echo: Echo, **allowed: Any) -> Iterator[tuple[FlightServer, Client]]:
    """A server with other limits, and its client."""
    server = FlightServer(echo, allowed=FlightLimits(**allowed))
    with server, Client(server.address, retry_s=0) as client:
        yield server, client


def test_a_call_has_a_limit(client: Client, echo: Echo) -> None:
    with (
        served(echo, call_bytes=1_000_000) as (_, limited),
        pytest.raises(errors.RequestError, match=r"The call has 2.* fewer messages"),
    ):
        limited.send("t", TABLE)

    assert not echo.calls
    assert client.send("t", TABLE).num_rows == 20


def test_all_calls_have_a_limit_and_leave_what_they_held(echo: Echo) -> None:
    with served(echo, calls_bytes=1_000_000) as (server, client):
        assert client.send("t", TABLE).num_rows == 20  # alone it may take more
        with server._room.hold(500_000, caller="other"):
            with pytest.raises(errors.BusyError, match="try again"):
                client.send("t", TABLE)
            assert client.send("t", pa.table({"body": [b"x"]})).num_rows == 1

        assert client.send("t", TABLE).num_rows == 20
        assert server._room._held == 0


@contextmanager
def begun(address: str, size: int) -> Iterator[flight.FlightStreamReader]:
    """A send that declares ``size`` bytes and nothing else."""
    said = json.dumps({"verb": "send", "args": {"topic": "t"}, "parts": [["messages", size]]})
    options = flight.FlightCallOptions(timeout=60)
    with flight.FlightClient(f"grpc://{address}") as client:
        writer, reader = client.do_exchange(
            flight.FlightDescriptor.for_command(said.encode()), options
        )
        writer.write_metadata(pa.py_buffer(b"x"))
        yield reader
        with suppress(flight.FlightError, pa.ArrowException):
            writer.close()


def refused_with(reader: flight.FlightStreamReader) -> errors.RocketMQError:
    with pytest.raises((flight.FlightError, pa.ArrowException)) as caught:
        reader.read_chunk()
    with pytest.raises(errors.RocketMQError) as refused:
        wire.check_status(str(caught.value))
    return refused.value


def test_a_call_that_sends_nothing_more_is_refused(echo: Echo) -> None:
    with served(echo, silent_s=0.2) as (server, _):
        with begun(server.address, 1_000_000) as reader:
            said = refused_with(reader)

        assert isinstance(said, errors.RequestError)
        assert "sent 1 of the 1000000 bytes of its body, and then nothing for 0.2 s" in said.message
        until(lambda: server._room._held == 0)


def test_who_holds_all_the_room_and_is_silent_makes_room_for_others(echo: Echo) -> None:
    half = TABLE.slice(0, 10)
    with served(echo, calls_bytes=4_100_000, silent_s=60.0) as (server, client):
        with begun(server.address, 4_000_000) as silent:
            until(lambda: server._room._held > 4_000_000)
            with pytest.raises(errors.BusyError, match="try again"):
                client.send("t", half)
            assert "another caller is refused" in refused_with(silent).message

        assert client.send("t", half).num_rows == 10


def test_a_share_of_the_room_is_kept_while_others_want_it() -> None:
    room = Room(FlightLimits(calls_bytes=1_000_000))
    with ExitStack() as held:
        held.enter_context(room.hold(450_000, caller="one"))
        with room.hold(450_000, caller="one"):
            room.check_share("one")
            with pytest.raises(errors.BusyError, match="under way"):
                held.enter_context(room.hold(200_000, caller="two"))
            with pytest.raises(errors.BusyError, match="another caller is refused"):
                room.check_share("one")
            room.check_share("two")
        room.check_share("one")
        with pytest.raises(errors.BusyError, match="another caller is refused"):
            held.enter_context(room.hold(100_000, caller="one"))
        held.enter_context(room.hold(200_000, caller="two"))

    assert not room._by_caller


def test_a_large_call_that_comes_fast_is_read_to_its_end() -> None:
    room = Room(FlightLimits(calls_bytes=1_000_000))
    with room.hold(1_100_000, caller="large"):
        with pytest.raises(errors.BusyError, match="under way"), room.hold(200_000, caller="two"):
            pass
        room.check_share("large", bytes_per_s=service_module.FAIR_BYTES_PER_S)
        with pytest.raises(errors.BusyError, match="another caller is refused"):
            room.check_share("large", bytes_per_s=service_module.FAIR_BYTES_PER_S - 1)

    # Now it is the turn of the other one.
    with pytest.raises(errors.BusyError, match="another caller is refused"):
        room.hold(1_100_000, caller="large").__enter__()
    with room.hold(200_000, caller="two"):
        pass


def test_a_call_that_waits_holds_little(server: FlightServer, echo: Echo) -> None:
    args = {"topic": "t", "group": "g", "wait_ms": 60_000, "attempt_id": "a"}
    args["queue_ids"] = list(range(10_000))
    large = {"verb": "receive", "args": {**args, "queue_ids": [{}] * 100_000}}
    refused = refusal(server.address, large)
    assert isinstance(refused, errors.RequestError)
    assert "a call that waits may hold" in refused.message
    junk = stream(pa.table({"receipt_handle": ["r"], "junk": [bytes(limits.FLIGHT_WAITING_BYTES)]}))
    asks = {"verb": "receive", "args": {"topic": "t", "group": "g", "wait_ms": 60_000}}
    refused = refusal(server.address, asks, [("ack", junk)])
    assert isinstance(refused, errors.RequestError)
    assert "ack in a call of its own" in refused.remedy

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(refusal, server.address, {"verb": "receive", "args": args})
        echo.wait_until_waiting(1)
        assert server._room._held < 800_000
        echo.deliver(pa.table({"body": [b"x"]}))
        assert waiting.result(20) is None


def test_a_long_command_is_refused(server: FlightServer) -> None:
    with (
        Client(server.address, retry_s=0) as client,
        pytest.raises(errors.RequestError, match="the limit is"),
    ):
        client.sql("x" * limits.FLIGHT_COMMAND_BYTES)

    refused = refusal(server.address, {**SEND, "more": "x" * limits.FLIGHT_COMMAND_BYTES})

    assert isinstance(refused, errors.RequestError)
    assert "the limit is" in refused.message
    assert wire.PIECE_BYTES > limits.BODY_BYTES
