"""A broker of the test's process behind its table endpoint, and the resources that point at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from dagster._core.events import DagsterEvent

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import Clock, ManualClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.orchestration.declarations import DeclaredGroup
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.upkeep_assets import WINDOW_TAG
from rmq_pipeline.settings import Settings

SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)

Send = Callable[..., pa.Table]
#: Makes a run of a window that ends with a status, so many seconds after CODE_SINCE_S; its id.
Ran = Callable[..., str]
CODE_SINCE_S = 1_800_000_000.0


@dataclass(frozen=True)
class Reads:
    """A consumer, as far as the sensor is concerned."""

    group: DeclaredGroup
    job: Any
    resources: frozenset[str] = frozenset()
    lacks: Callable[[Any], str] = lambda _resources: ""


@pytest.fixture
def clock() -> Clock:
    """Turned by hand; a module that waits in real time has its own."""
    return ManualClock()


@pytest.fixture
def broker(home: Path, clock: Clock) -> Iterator[Broker]:
    with Broker.open(home, clock=clock, upkeep="none", settings=SMALL) as broker:
        yield broker


@pytest.fixture
def resource(broker: Broker) -> Iterator[BrokerResource]:
    with FlightServer(broker) as server:
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


@dg.asset
def some_asset() -> None:
    """Stands for a consumer."""


@pytest.fixture
def ran(instance: dg.DagsterInstance) -> Ran:
    job = dg.Definitions(
        assets=[some_asset], jobs=[dg.define_asset_job("some_job", selection=[some_asset])]
    ).resolve_job_def("some_job")
    status = dg.DagsterRunStatus
    kinds = {
        status.FAILURE: dg.DagsterEventType.RUN_FAILURE,
        status.SUCCESS: dg.DagsterEventType.RUN_SUCCESS,
        status.CANCELED: dg.DagsterEventType.RUN_CANCELED,
    }

    def ran(name: str, status: dg.DagsterRunStatus, at_s: float, **tags: str) -> str:
        tags = {WINDOW_TAG: name, **tags}
        run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags=tags)
        event = DagsterEvent(kinds[status].value, job_name=job.name, message="The run is over.")
        instance.report_dagster_event(event, run.run_id, timestamp=CODE_SINCE_S + at_s)
        return run.run_id

    return ran
