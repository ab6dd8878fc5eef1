"""An endpoint in the test's process, and calls of its protocol as they go over the wire."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from rmq_pipeline.rocketmq.grpc_endpoint import GrpcEndpoint
from rmq_pipeline.route_table import RouteFile
from rmq_pipeline.settings import Settings
from tests.conformance.raw import Raw

#: A broker and its endpoint, with other settings than the usual ones.
Opened = tuple[Broker, GrpcEndpoint, ManualClock]
Open = Callable[..., Opened]


@pytest.fixture
def open_endpoint(tmp_path: Path) -> Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def open_endpoint(home: str = "home", **settings: Any) -> Opened:
            small: dict[str, Any] = {"reserve_bytes": 1 << 20, "log_file_bytes": 8 << 20}
            chosen = Settings(**{**small, **settings})
            clock = ManualClock()
            broker = stack.enter_context(
                Broker.open(tmp_path / home, clock=clock, upkeep="none", settings=chosen)
            )
            endpoint = GrpcEndpoint(broker, routes=RouteFile.of(chosen))
            stack.callback(endpoint.shutdown)
            return broker, endpoint, clock

        yield open_endpoint


@pytest.fixture
def opened(open_endpoint: Open) -> Opened:
    return open_endpoint()


@pytest.fixture
def broker(opened: Opened) -> Broker:
    return opened[0]


@pytest.fixture
def clock(opened: Opened) -> ManualClock:
    return opened[2]


@pytest.fixture
def client(opened: Opened) -> Iterator[Callable[..., Raw]]:
    """Makes clients of the endpoint."""
    with contextlib.ExitStack() as stack:
        yield lambda **how: stack.enter_context(Raw(opened[1].address, **how))
