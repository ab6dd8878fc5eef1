"""Spans of windows that Dagster runs, their export as the environment says, and their absence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from opentelemetry import trace

from rmq_pipeline import span_export, tracing
from rmq_pipeline.broker import Broker
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.orchestration.consumer import (
    TRACE_TAG,
    ConsumerConfig,
    Declaration,
    python_consumer,
    spark_consumer,
)
from rmq_pipeline.orchestration.declarations import topic
from rmq_pipeline.orchestration.resources import BrokerResource, LazyPySparkResource, SinkResource
from rmq_pipeline.testing import TestBroker
from tests.tracing.collector import Collector

ORDERS, INVOICES = topic("orders", queues=1), topic("invoices", queues=1)


def bill(messages: pa.Table, _state: pa.Table) -> Outcome:
    """Publish an invoice for each order."""
    return Outcome(publish={"invoices": messages.select(["body"])})


def declared(decorator: type[Declaration] = python_consumer) -> Any:
    return decorator(topic=ORDERS, group="billing", publishes=[INVOICES], parallelism=1)(bill)


def run(
    broker: Broker, root: Path, instance: dg.DagsterInstance, consumer: Any = None, **more: Any
) -> dg.DagsterRun:
    """Have Dagster run one window; its run."""
    consumer = consumer or declared()
    with FlightServer(broker) as server:
        result = dg.materialize(
            [consumer.asset],
            instance=instance,
            resources={
                "broker": BrokerResource(address=server.address),
                "sinks": SinkResource(root=str(root)),
                **more,
            },
            run_config=dg.RunConfig(ops={"billing": ConsumerConfig(idle_seconds=0.3)}),
        )
    found = instance.get_run_by_id(result.run_id)
    assert found is not None
    return found


@pytest.fixture
def orders(broker: Broker) -> Broker:
    broker.create_topic("orders", queues=1)
    return broker


@pytest.mark.dagster
@pytest.mark.parametrize(
    "decorator",
    [python_consumer, pytest.param(spark_consumer, marks=[pytest.mark.spark, pytest.mark.slow])],
)
def test_a_run_is_the_parent_of_its_batches_and_has_a_tag(
    orders: Broker,
    tmp_path: Path,
    traces: Collector,
    decorator: type[Declaration],
) -> None:
    with FlightServer(orders) as server, Client(server.address) as client:
        client.send("orders", pa.table({"body": [b"a", b"b"]}))
    more = {} if decorator is python_consumer else {"spark": LazyPySparkResource(spark_config={})}

    with dg.DagsterInstance.ephemeral() as instance:
        ran = run(orders, tmp_path, instance, declared(decorator), **more)

    sent, window = traces.span("send orders"), traces.span("window billing")
    batch, invoices = traces.span("process orders"), traces.span("send invoices")
    assert window.attributes["dagster.run_id"] == ran.run_id
    assert window.attributes["dagster.asset_key"] == "billing"
    assert ran.tags[TRACE_TAG] == window.trace_id
    assert (batch.trace_id, batch.parent_id, batch.links) == (*window.place, [sent.place])
    assert (invoices.trace_id, invoices.parent_id) == batch.place
    assert sent.trace_id != window.trace_id


@pytest.mark.dagster
@pytest.mark.usefixtures("untraced")
def test_a_run_without_a_provider_has_no_tag(orders: Broker, tmp_path: Path) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        assert TRACE_TAG not in run(orders, tmp_path, instance).tags


@pytest.mark.dagster
@pytest.mark.usefixtures("untraced")
def test_the_environment_makes_a_run_export_its_spans(
    orders: Broker, tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.send("orders", pa.table({"body": [b"a"]}))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)

    with dg.DagsterInstance.ephemeral() as instance:
        run(orders, tmp_path, instance)

    # All of them are there when the run has ended: its process may exit at once.
    assert collector.span("window billing").service == "rmq_pipeline"
    assert collector.span("process orders").links == []
    assert collector.paths[0] == "/v1/traces"


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": " "},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "True"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ],
)
def test_the_environment_can_ask_for_no_spans(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with span_export.exporting():
        assert not tracing.is_on()


def test_a_provider_of_the_program_wins(
    traces: Collector, provider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")

    with span_export.exporting(), tracing.window("mine", {}):
        assert trace.get_tracer_provider() is provider

    assert traces.span("window mine").service != "rmq_pipeline"


@pytest.mark.usefixtures("untraced")
def test_the_service_has_the_name_of_the_environment(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=shop")

    with span_export.exporting(), tracing.window("mine", {}):
        pass

    assert collector.span("window mine").service == "shop"


def test_a_test_of_a_pipeline_sees_its_spans(traces: Collector) -> None:
    with TestBroker.open() as rmq:
        rmq.publish(ORDERS, ["a", "b"])
        assert rmq.drain(declared()).acked == 2
        found = rmq.messages(INVOICES)["properties"].to_pylist()

    sent, batch = traces.span("send orders"), traces.span("process orders")
    assert batch.links == [sent.place]
    assert traces.span("send invoices").parent_id == batch.span_id
    assert {dict(each)["TRACE_CONTEXT"][3:35] for each in found} == {batch.trace_id}


HIDDEN = "sys.modules['opentelemetry'] = None"
PROGRAM = """
import sys
{before}
import pyarrow as pa
from rmq_pipeline import span_export, tracing
from rmq_pipeline.flight.client import Client
from rmq_pipeline.consumer.push_consumer import PushConsumer
from rmq_pipeline.consumer.window import run_window
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.handling.spec import ConsumerSpec

with span_export.exporting(), tracing.window("w", {{}}) as span, Client({address!r}) as client:
    assert span.trace_id is None
    table = pa.table({{"body": [b"x"]}})
    client.send("orders", table)
    client.send_async("orders", table).result(60)
    spec = ConsumerSpec(name="g", topic="orders", group="g", handler=lambda m, s: Outcome())
    assert run_window(spec, client, owner="me", idle_s=0.3).acked == 2
loaded = [name for name in sys.modules if name.startswith("opentelemetry") and sys.modules[name]]
assert not loaded, loaded
"""


@pytest.mark.parametrize(
    "before",
    [
        "",
        HIDDEN,
        f"{HIDDEN}; import os; os.environ['OTEL_EXPORTER_OTLP_ENDPOINT'] = 'http://127.0.0.1:9'",
    ],
)
def test_a_program_without_opentelemetry_does_the_same_and_imports_nothing(
    orders: Broker, before: str
) -> None:
    orders.create_group("g")
    with FlightServer(orders) as server:
        code = PROGRAM.format(before=before, address=server.address)
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )

    assert ended.returncode == 0, ended.stderr
    assert ("Install rmq_pipeline[otel]" in ended.stderr) == ("ENDPOINT" in before)
    properties = orders.read("orders", 0, offset=0, limit=9)["properties"].to_pylist()
    assert properties == [None, None]
