from collections.abc import Iterator

import pytest

from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from tests.flight.echo import Echo


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def server(echo: Echo) -> Iterator[FlightServer]:
    server = FlightServer(echo, token="right")
    yield server
    server.refuse()
    echo.clock.advance(120_000)  # whoever still waits, as its test has failed, would hold it up
    server.shutdown()


@pytest.fixture
def client(server: FlightServer) -> Iterator[Client]:
    with Client(server.address, retry_s=0) as client:
        yield client
