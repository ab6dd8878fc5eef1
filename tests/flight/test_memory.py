"""What strangers, and callers with rights, can make the process of a broker hold."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import pyarrow as pa
import pytest
from pyarrow import flight

from rmq_pipeline import errors
from rmq_pipeline.broker import Broker
from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.flight import framing, process, wire
from rmq_pipeline.flight.client import Client
from rmq_pipeline.limits import FLIGHT_SLICE_BYTES, MIB, FlightLimits
from rmq_pipeline.settings import Settings
from tests.flight.exchange import message
from tests.memory import MemoryWatch, bytes_of
from tests.waiting import until

SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)
ANN = ("authorization", "Basic YW5uOmFubnMtcGFzc3dvcmQ=")


def send(size: int) -> bytes:
    """The command of a send of ``size`` bytes."""
    args = {"verb": "send", "args": {"topic": "t"}, "parts": [["messages", size]]}
    return json.dumps(args).encode()


CALLS_BYTES = FlightLimits().calls_bytes
SLICE = pa.py_buffer(b"x" * FLIGHT_SLICE_BYTES)
EXCHANGE = "/arrow.flight.protocol.FlightService/DoExchange"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    home = tmp_path_factory.mktemp("memory") / "home"
    with Broker.open(home, upkeep="none", settings=SMALL) as broker:
        broker.create_topic("t", queues=1)
        broker.create_user("ann", password="anns-password")
        broker.put_policy("ann", resource="topic:t", actions=["pub"])
    yield process.start(home)
    process.stop(home)


def outer(served: Endpoint, size: int, *, compression: str | None = None, headers: Any = ()) -> str:
    """Send a table as a Flight message of its own, as our client does not; how that ended."""
    options = flight.FlightCallOptions(
        timeout=120,
        headers=list(headers),
    )
    zeros = pa.py_buffer(bytes(size))
    offsets = pa.py_buffer(bytes(8) + size.to_bytes(8, "little"))
    column = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, zeros])
    batch = pa.record_batch({"table": column})
    with flight.FlightClient(f"grpc://{served.flight}") as client:
        try:
            writer, reader = client.do_exchange(
                flight.FlightDescriptor.for_command(send(size)), options
            )
            with suppress(flight.FlightError, pa.ArrowException), writer:
                writer.begin(batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression))
                writer.write_with_metadata(batch, pa.py_buffer(b"messages"))
                writer.done_writing()
            return str([chunk.app_metadata for chunk in reader])
        except (flight.FlightError, pa.ArrowException) as error:
            return str(error)


def ann() -> list[tuple[bytes, bytes]]:
    return [(ANN[0].encode(), ANN[1].encode())]


def test_a_caller_without_credentials_costs_no_memory(served: Endpoint) -> None:
    watch = MemoryWatch(served.pid)

    said = outer(served, 700 * MIB)

    assert "UnauthorizedError" in said
    assert watch.rise() < 64 * MIB


def test_slices_of_a_caller_without_credentials_cost_no_memory(served: Endpoint) -> None:
    watch = MemoryWatch(served.pid)
    table = pa.table({"body": [bytes(MIB)] * 300})

    with Client(served.flight, retry_s=0) as client, pytest.raises(errors.UnauthorizedError):
        client.send("t", table)

    assert watch.rise() < 64 * MIB


def test_a_caller_without_rights_costs_no_memory(served: Endpoint) -> None:
    watch = MemoryWatch(served.pid)
    table = pa.table({"body": [bytes(MIB)] * 300})

    with (
        Client(served.flight, user="ann", password="anns-password", retry_s=0) as client,
        pytest.raises(errors.ForbiddenError, match="may not pub topic other"),
    ):
        client.send("other", table)

    assert watch.rise() < 64 * MIB


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_compressed_flight_message_is_not_unpacked(served: Endpoint, compression: str) -> None:
    watch = MemoryWatch(served.pid)

    said = outer(served, 700 * MIB, compression=compression, headers=ann())

    assert "RequestError" in said or "larger than max" in said
    assert watch.rise() < 64 * MIB


@pytest.mark.parametrize("headers", [(), (ANN,)], ids=["stranger", "ann"])
def test_a_compressed_grpc_message_is_not_unpacked(served: Endpoint, headers: Any) -> None:
    watch = MemoryWatch(served.pid)
    said = message(send(1024 * MIB))
    bomb = said + framing.write_message(bytes(1000 * MIB))

    with grpc.insecure_channel(served.flight) as channel:
        call = channel.stream_stream(EXCHANGE)(
            iter([said, bomb]), metadata=headers, compression=grpc.Compression.Gzip, timeout=120
        )
        with pytest.raises(grpc.RpcError):
            list(call)

    assert watch.rise() < 64 * MIB


def test_calls_with_rights_hold_no_more_than_all_may(served: Endpoint) -> None:
    size, callers = 240 * MIB, 8
    watch = MemoryWatch(served.pid)

    def hold(client: flight.FlightClient) -> Any:
        """Send all but the last slice of a call."""
        writer, reader = client.do_exchange(
            flight.FlightDescriptor.for_command(send(size)),
            flight.FlightCallOptions(timeout=120, headers=ann()),
        )
        try:
            for _ in range(size // FLIGHT_SLICE_BYTES - 1):
                writer.write_metadata(SLICE)
        except (flight.FlightError, pa.ArrowException):
            with pytest.raises((flight.FlightError, pa.ArrowException)) as refused:
                reader.read_chunk()
            with pytest.raises(errors.BusyError):
                wire.check_status(str(refused.value))
            return None
        return reader

    with (
        flight.FlightClient(f"grpc://{served.flight}") as client,
        ThreadPoolExecutor(callers) as pool,
    ):
        held = [reader for reader in pool.map(hold, [client] * callers) if reader is not None]
        risen = watch.rise()
        for reader in held:
            reader.cancel()

    assert len(held) == CALLS_BYTES // size
    assert (len(held) - 1) * size < risen < CALLS_BYTES + 64 * MIB


def test_what_a_large_send_took_goes_back_to_the_system(served: Endpoint) -> None:
    table = pa.table({"body": [bytes(MIB)] * 200})
    with Client(served.flight, user="ann", password="anns-password", retry_s=0) as client:
        client.send("t", pa.table({"body": [b"x"]}))
        before = bytes_of(served.pid, "VmRSS")
        client.send("t", table)

        # Sooner than its thread ends, which would give it back, too.
        until(lambda: bytes_of(served.pid, "VmRSS") - before < 64 * MIB, within_s=5)


def test_a_refusal_reaches_callers_that_still_write(served: Endpoint) -> None:
    table = pa.table({"body": [bytes(MIB)] * 24})

    def refused(user: str | None) -> list[str]:
        found = []
        password = "anns-password" if user else None
        with Client(served.flight, user=user, password=password, retry_s=0) as client:
            for _ in range(20):
                with pytest.raises(errors.AccessError) as caught:
                    client.send("other", table)
                found.append(type(caught.value).__name__)
        return found

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(refused, ["ann", None, "ann", None]))

    assert found == [["ForbiddenError"] * 20, ["UnauthorizedError"] * 20] * 2
