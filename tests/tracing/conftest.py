"""A tracer provider that exports each span to a collector of the test when the span ends."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.util._once import Once

from rmq_pipeline.broker import Broker
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.settings import Settings
from tests.tracing.collector import Collector

SMALL = Settings(reserve_bytes=1024 * 1024, log_file_bytes=8 * 1024 * 1024)


@contextmanager
def without_provider() -> Iterator[None]:
    """OpenTelemetry takes one provider a process: forget it before and after a test."""
    before = trace._TRACER_PROVIDER, trace._TRACER_PROVIDER_SET_ONCE
    trace._TRACER_PROVIDER, trace._TRACER_PROVIDER_SET_ONCE = None, Once()
    try:
        yield
    finally:
        trace._TRACER_PROVIDER, trace._TRACER_PROVIDER_SET_ONCE = before


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


@pytest.fixture
def untraced() -> Iterator[None]:
    """A process without a tracer provider."""
    with without_provider():
        yield


@pytest.fixture
def provider(collector: Collector, untraced: None) -> Iterator[TracerProvider]:  # noqa: ARG001
    """A user's own provider."""
    made = TracerProvider(shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{collector.url}/v1/traces")
    made.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(made)
    yield made
    made.shutdown()


@pytest.fixture
def traces(collector: Collector, provider: TracerProvider) -> Collector:  # noqa: ARG001
    """The collector of the provider's spans."""
    return collector


@pytest.fixture
def tracer(provider: TracerProvider) -> trace.Tracer:
    """The tracer of a user's program."""
    return provider.get_tracer("user")


@pytest.fixture
def broker(home: Path) -> Iterator[Broker]:
    with Broker.open(home, upkeep="none", settings=SMALL) as broker:
        yield broker


@pytest.fixture
def client(broker: Broker) -> Iterator[Client]:
    with FlightServer(broker) as server, Client(server.address) as client:
        yield client


Stored = Callable[[str], list[dict[str, str]]]


@pytest.fixture
def properties(client: Client) -> Stored:
    """The properties of the messages of a topic with one queue."""

    def read(topic: str) -> list[dict[str, str]]:
        found = client.read(topic, 0, offset=0, limit=100_000)
        return [dict(each or ()) for each in found["properties"].to_pylist()]

    return read
