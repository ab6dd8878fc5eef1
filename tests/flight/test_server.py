"""Who is let in, and how long polls wait."""

from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from rmq_pipeline import errors
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.limits import FlightLimits
from tests.flight.echo import Echo


def test_another_token_is_refused(server: FlightServer) -> None:
    with (
        Client(server.address, token="wrong", retry_s=0) as wrong,
        Client(server.address, token="right", retry_s=0) as right,
    ):
        with pytest.raises(errors.BrokerUnavailableError, match="Another broker"):
            wrong.ping()

        assert right.ping()["pid"] > 0


@pytest.mark.parametrize("address", ["0.0.0.0:0", "10.0.0.1:80", "example.com:80", "[::]:80"])
def test_address_beyond_loopback_is_refused(address: str, echo: Echo) -> None:
    with pytest.raises(errors.RequestError, match="beyond loopback"):
        FlightServer(echo, address)


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:http", "127.0.0.1:70000", ":80"])
def test_address_that_is_none_is_refused(address: str, echo: Echo) -> None:
    with pytest.raises(errors.RequestError, match="not HOST:PORT"):
        FlightServer(echo, address)


def test_address_in_use_is_refused(server: FlightServer, echo: Echo) -> None:
    with pytest.raises(errors.RequestError, match="in use"):
        FlightServer(echo, server.address)


def test_the_limit_of_calls_is_an_error_that_says_so(echo: Echo) -> None:
    server = FlightServer(echo, allowed=FlightLimits(calls=2))
    with server, Client(server.address, retry_s=0) as client, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(client.receive, "g", "t", wait_ms=60_000) for _ in range(2)]
        echo.wait_until_waiting(2)

        for table in (pa.table({"body": [b"x"]}), pa.table({"body": [bytes(1 << 20)] * 30})):
            with pytest.raises(errors.BusyError, match="has as many calls under way as it accepts"):
                client.send("t", table)
        with pytest.raises(
            errors.BusyError, match="has as many calls under way as it accepts"
        ) as refused:
            client.lag()
        assert type(refused.value) is errors.BusyError

        echo.deliver(pa.table({"body": [b"x"]}))
        assert [each.result(20).num_rows for each in waiting] == [1, 1]
        assert client.send("t", pa.table({"body": [b"x"]})).num_rows == 1


def test_a_call_beyond_the_limit_of_calls_is_made_again(echo: Echo) -> None:
    server = FlightServer(echo, allowed=FlightLimits(calls=1))
    with server, Client(server.address, retry_s=60) as client, ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(client.receive, "g", "t", wait_ms=60_000)
        echo.wait_until_waiting(1)
        sending = pool.submit(client.send, "t", pa.table({"body": [b"x"]}))
        assert not echo.calls

        echo.deliver(pa.table({"body": [b"y"]}))

        assert waiting.result(60)["body"].to_pylist() == [b"y"]
        assert sending.result(60)["body"].to_pylist() == [b"x"]


def test_long_polls_wait_side_by_side_while_others_are_answered(client: Client, echo: Echo) -> None:
    polls = 100
    with ThreadPoolExecutor(polls) as pool:
        waiting = [pool.submit(client.receive, "g", "t", wait_ms=60_000) for _ in range(polls)]
        echo.wait_until_waiting(polls)
        assert client.offset_at("t", 0, at_ms=0) == 1

        echo.deliver(pa.table({"n": [7]}))
        assert all(poll.result(20)["n"].to_pylist() == [7] for poll in waiting)


def test_long_poll_ends_when_its_time_has_come(client: Client, echo: Echo) -> None:
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(client.receive, "g", "t", wait_ms=2_500)
        for _ in range(3):
            echo.wait_until_waiting(1)
            assert not poll.done()
            before = echo.clock.now_ms()
            echo.clock.advance(1_000)
            assert echo.clock.now_ms() == before + 1_000

        assert poll.result(20).num_rows == 0


def test_long_poll_of_a_client_that_went_away_ends(server: FlightServer, echo: Echo) -> None:
    client = Client(server.address, retry_s=0)
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(client.receive, "g", "t", wait_ms=60_000)
        echo.wait_until_waiting(1)

        client.close()
        with pytest.raises(errors.BrokerUnavailableError):
            poll.result(20)

        # The news that it has gone takes a while; the poll itself would end after 60 s.
        for _ in range(40):
            echo.clock.advance(1_000)
            if echo.is_left_alone(within_s=0.5):
                break
        else:
            pytest.fail("the poll still waits after 40 s of the broker's clock")
