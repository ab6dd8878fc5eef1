"""Sends in the background."""

import pyarrow as pa

from rmq_pipeline import errors
from rmq_pipeline.flight.client import Client
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
