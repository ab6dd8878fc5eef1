"""Memory of Flight SQL: each byte that a caller can make the broker take is counted or limited."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import flight

from rmq_pipeline import limits
from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import MessageBodyTooLargeError
from rmq_pipeline.flight import framing, sql_messages
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.flight.sql_endpoint import _messages
from rmq_pipeline.settings import Settings
from tests.conftest import Eventually

SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)
PIECE = limits.FLIGHT_SQL_PIECE_BYTES


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlightServer]:
    home: Path = tmp_path_factory.mktemp("sql") / "home"
    allowed = limits.FlightLimits(calls_bytes=16 * limits.MIB)
    with (
        Broker.open(home, upkeep="none", settings=SMALL) as broker,
        FlightServer(broker, allowed=allowed) as server,
    ):
        yield server


@pytest.fixture
def client(endpoint: FlightServer) -> Iterator[flight.FlightClient]:
    with flight.connect(f"grpc://{endpoint.address}") as client:
        yield client


def of_query(sql: str) -> flight.FlightDescriptor:
    command = sql_messages.new("CommandStatementQuery", query=sql)
    return flight.FlightDescriptor.for_command(sql_messages.write_any(command))


# --------------------------------------------------------------------------------------- answers


def test_an_enum_is_converted_a_piece_at_a_time() -> None:
    text = "a" * 100_000
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 1_000, pa.uint8()), pa.array([text]))
    table = pa.table({"e": column, "n": range(1_000)})
    before = pa.total_allocated_bytes()

    lengths = []
    for message in _messages(table):  # 100 MB as texts
        assert pa.total_allocated_bytes() - before < 8 * PIECE
        lengths.append(len(message))

    assert sum(lengths) > 1_000 * len(text)
    assert max(lengths) < 2 * PIECE


@pytest.mark.parametrize("values", [[], ["a", None, "bcd"]])
def test_an_enum_has_its_values_as_texts(values: list[str | None]) -> None:
    texts = pa.array(values, pa.string())
    enum = pa.table({"e": texts.dictionary_encode()})
    if not values:
        enum = enum.slice(0, 0)

    stream = framing.Stream(limits.MIB)
    for message in _messages(enum):
        stream.add(framing.read_data(message))

    assert framing.read("answer", stream.whole()).equals(pa.table({"e": texts}))


def test_rows_of_different_lengths_arrive_in_small_pieces() -> None:
    texts = ["a"] * 20_000 + ["b" * 100_000] * 100

    messages = list(_messages(pa.table({"t": texts})))

    assert max(map(len, messages)) < 2 * PIECE + 10_000
    stream = framing.Stream(100 * limits.MIB)
    for message in messages:
        stream.add(framing.read_data(message))
    assert framing.read("answer", stream.whole())["t"].to_pylist() == texts


# ------------------------------------------------------------------------------------ parameters


def message_of(header: bytes, *, metadata: bytes = b"", body: bytes = b"") -> bytes:
    fields = ((b"\x12", header), (b"\x1a", metadata), (b"\xc2\x3e", body))
    return b"".join(tag + _length(len(data)) + data for tag, data in fields)


def _length(size: int) -> bytes:
    found = bytearray()
    while size > 0x7F:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*found, size])


@pytest.mark.parametrize("header", [b"", b"h"])
@pytest.mark.parametrize("metadata", [b"", b"m" * 600_000])
def test_all_bytes_of_the_messages_count(header: bytes, metadata: bytes) -> None:
    body = b"" if metadata else b"b" * 600_000
    message = message_of(header, metadata=metadata, body=body)
    stream = framing.Stream(limits.MIB)

    stream.add(framing.read_data(message))
    with pytest.raises(MessageBodyTooLargeError, match="more than 1048576 bytes"):
        stream.add(framing.read_data(message))


def test_many_small_pieces_are_limited_by_their_stream() -> None:
    stream = framing.Stream(10_000)
    piece = framing.read_data(message_of(b"h"))

    for _ in range(10_000 // 16):
        stream.add(piece)
    with pytest.raises(MessageBodyTooLargeError):
        stream.add(piece)


def test_a_stream_keeps_nothing_of_a_message() -> None:
    message = bytearray(message_of(b"header", metadata=b"metadata", body=b"body"))
    stream = framing.Stream(limits.MIB)

    stream.add(framing.read_data(memoryview(message)))

    message.clear()  # a BufferError if a view of it exists
    assert b"body" in stream.whole().to_pybytes()


def test_a_call_that_binds_holds_its_memory_from_the_start(
    endpoint: FlightServer, client: flight.FlightClient, eventually: Eventually
) -> None:
    request = sql_messages.new("ActionCreatePreparedStatementRequest", query="SELECT ?")
    action = flight.Action("CreatePreparedStatement", sql_messages.write_any(request))
    (answer,) = client.do_action(action)
    _, made = sql_messages.read_any(answer.body.to_pybytes())
    handle = made.prepared_statement_handle
    command = sql_messages.new("CommandPreparedStatementQuery", prepared_statement_handle=handle)
    descriptor = flight.FlightDescriptor.for_command(sql_messages.write_any(command))
    values = pa.table({"a": [1]})

    writer, reader = client.do_put(descriptor, values.schema)
    with writer:
        eventually(lambda: endpoint._room._held == limits.FLIGHT_SQL_PARAMETERS_BYTES)
        writer.write_table(values)
        writer.done_writing()
        assert reader.read() is not None

    eventually(lambda: endpoint._room._held == 0)


# -------------------------------------------------------------------------------------- messages


def test_a_message_of_more_than_2_mib_is_not_decoded(client: flight.FlightClient) -> None:
    empty = b"\x1a\x00"  # an endpoint of FlightInfo
    info = empty * (limits.FLIGHT_SQL_MESSAGE_BYTES // len(empty))

    with pytest.raises(MessageBodyTooLargeError, match="the limit is 2097152"):
        sql_messages.read("FlightInfo", info + empty)
    with pytest.raises(pa.ArrowInvalid, match="the limit is 2097152"):
        list(client.do_action(flight.Action("CancelFlightInfo", info + empty)))


def test_a_message_is_decoded_only_if_there_is_room(
    endpoint: FlightServer, client: flight.FlightClient
) -> None:
    long = of_query("SELECT '" + "a" * 100_000 + "'")

    with (
        endpoint._room.hold(15 * limits.MIB, caller="another"),
        pytest.raises(pa.ArrowInvalid, match="Calls under way hold"),
    ):
        client.get_flight_info(long)

    assert client.get_flight_info(long).endpoints
