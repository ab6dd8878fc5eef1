"""A broker of the test's process behind its table door, and the resources that point at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import Clock, ManualClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.orchestration.broker_resource import BrokerResource
from rmq_pipeline.settings import Settings

SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)

Send = Callable[..., pa.Table]


@pytest.fixture
def clock() -> Clock:
    """Turned by hand; a module that waits in real time has its own."""
    return ManualClock()


@pytest.fixture
def broker(home: Path, clock: Clock) -> Iterator[Broker]:
    with Broker.open(home, clock=clock, upkeep="none", settings=SMALL) as broker:
        yield broker


@pytest.fixture
def resource(broker: Broker, clock: Clock) -> Iterator[BrokerResource]:
    with FlightServer(broker, clock=clock) as server:
        yield BrokerResource(address=server.address)


@pytest.fixture
def client(resource: BrokerResource) -> Iterator[Client]:
    with resource.client() as client:
        yield client


@pytest.fixture
def away() -> BrokerResource:
    """Where no broker answers."""
    return BrokerResource(address="127.0.0.1:1")


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def send(client: Client) -> Send:
    """Send messages of the given columns; the bodies are made up."""

    def send(topic: str, count: int = 1, **columns: list[Any]) -> pa.Table:
        return client.send(topic, pa.table({"body": [b"x"] * count, **columns}))

    return send
