"""Sends in the background."""

import threading
from concurrent.futures import Future

import pyarrow as pa
import pytest

from rmq_pipeline import errors
from rmq_pipeline.flight import client as client_module
from rmq_pipeline.flight.client import Client, Sender
from rmq_pipeline.flight.server import FlightServer
from tests.flight.echo import Echo


def test_background_sends_keep_their_order_and_their_answers(client: Client, echo: Echo) -> None:
    futures = [client.send_async("t", pa.table({"n": [n, n]})) for n in range(2_000)]

    assert [future.result(20)["n"].to_pylist() for future in futures] == [
        [n, n] for n in range(2_000)
    ]
    assert len(echo.calls) < 2_000


def test_background_send_that_is_refused_spoils_no_other(client: Client) -> None:
    tables = [pa.table({"body": [b"" if n == 5 else b"x"]}) for n in range(10)]
    futures = [client.send_async("t", table) for table in tables]

    outcomes = [type(future.exception(20)) for future in futures]

    assert outcomes[5] is errors.MessageBodyEmptyError
    assert set(outcomes[:5] + outcomes[6:]) == {type(None)}


def test_closing_sends_what_is_queued(server: FlightServer, echo: Echo) -> None:
    with Client(server.address) as client:
        for n in range(500):
            client.send_one_way("t", pa.table({"n": [n]}))

    assert sum(call[1]["rows"] for call in echo.calls) == 500


def test_background_sends_of_other_topics_and_schemas_stay_apart(client: Client) -> None:
    tables = [pa.table({"n": [1]}), pa.table({"m": ["a"]}), pa.table({"n": [2]})]
    futures = [client.send_async(f"t{n % 2}", tables[n % 3]) for n in range(60)]

    assert all(f.result(20).equals(tables[n % 3]) for n, f in enumerate(futures))


class Gate:
    """Sends that wait until they may."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may = threading.Event()
        self.sent: list[int] = []

    def send(self, _topic: str, messages: pa.Table) -> pa.Table:
        self.begun.set()
        assert self.may.wait(20)
        self.sent += messages["n"].to_pylist()
        return messages


def of(number: int) -> pa.Table:
    return pa.table({"n": [number], "body": [b"x" * 600]})


def test_a_callback_that_sends_does_not_wait_for_the_room_it_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "WAITING_BYTES", 1000)
    gate, first, last = Gate(), Future[pa.Table](), Future[pa.Table]()
    sender = Sender(gate.send)
    first.add_done_callback(lambda _: sender.put("t", of(4), future=last))
    sender.put("t", of(1), future=first)
    assert gate.begun.wait(20)
    for number in (2, 3):
        sender.put("t", of(number), future=None)

    gate.may.set()

    assert last.result(20)["n"].to_pylist() == [4]
    assert gate.sent == [1, 2, 3, 4]
    sender.close()


class GatedEcho(Echo):
    """Answers when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.may = threading.Event()

    def send(self, topic: str, messages: pa.Table) -> pa.Table:
        self.begun.set()
        assert self.may.wait(20)
        return super().send(topic, messages)


def test_a_callback_may_close_its_client_and_what_is_queued_is_sent() -> None:
    echo = GatedEcho()
    server = FlightServer(echo)
    client = Client(server.address, retry_s=0)
    first = client.send_async("t", of(0))
    first.add_done_callback(lambda _: client.close())
    assert echo.begun.wait(20)
    queued = [client.send_async("t", of(number)) for number in range(1, 4)]
    client.send_one_way("t", of(4))

    echo.may.set()

    assert [future.result(20)["n"].to_pylist() for future in queued] == [[1], [2], [3]]
    # Closed once more, it is waited for.
    client.close()
    assert sum(call[1]["rows"] for call in echo.calls) == 5
    with pytest.raises(errors.BrokerUnavailableError, match="closed"):
        client.create_group("g")
    server.shutdown()


def test_a_closed_client_sends_nothing_in_the_background(client: Client) -> None:
    before = set(threading.enumerate())
    client.close()

    with pytest.raises(errors.BrokerUnavailableError, match="client is closed"):
        client.send_async("t", of(1))
    with pytest.raises(errors.BrokerUnavailableError, match="client is closed"):
        client.send_one_way("t", of(1))
    begun = set(threading.enumerate()) - before
    assert "rmq-sender" not in {thread.name for thread in begun}


def test_a_callback_may_close_its_sender() -> None:
    gate, first, closed = Gate(), Future[pa.Table](), threading.Event()
    sender = Sender(gate.send)

    def close(_: object) -> None:
        sender.close()
        closed.set()

    first.add_done_callback(close)
    gate.may.set()
    sender.put("t", of(1), future=first)

    assert closed.wait(20)
    with pytest.raises(errors.BrokerUnavailableError):
        sender.put("t", of(2), future=None)
    sender.close()
