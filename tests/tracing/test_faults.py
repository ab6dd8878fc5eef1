"""Faults of OpenTelemetry and its settings, and hostile contexts: the traced work goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler

from rmq_pipeline import schema, span_export, tracing
from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.push_consumer import PushConsumer
from rmq_pipeline.consumer.window import run_window
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.handling.spec import ConsumerSpec
from tests.tracing.collector import Collector
from tests.tracing.conftest import Stored
from tests.waiting import until

OTHER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OTHER_PLACE = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")


class FaultError(Exception):
    """An error of a program's own processor or sampler."""


class FaultyStart(SpanProcessor):
    def on_start(self, span: Any, parent_context: Any = None) -> None:  # noqa: ARG002
        raise FaultError("on_start")


class FaultyEnd(SpanProcessor):
    def on_end(self, span: Any) -> None:  # noqa: ARG002
        raise FaultError("on_end")


class FaultySampler(Sampler):
    def should_sample(self, *_args: Any, **_named: Any) -> Any:
        raise FaultError("should_sample")

    def get_description(self) -> str:
        return "faulty"


def faulty(kind: type[Any]) -> TracerProvider:
    if kind is FaultySampler:
        return TracerProvider(sampler=FaultySampler(), shutdown_on_exit=False)
    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(kind())
    return made


@pytest.fixture(params=[FaultyStart, FaultyEnd, FaultySampler])
def fault(request: pytest.FixtureRequest, untraced: None) -> Iterator[str]:  # noqa: ARG001
    """A program whose processor or sampler raises at each span."""
    tracing._logged.clear()
    trace.set_tracer_provider(faulty(request.param))
    yield request.param.__name__
    tracing._logged.clear()


@pytest.fixture
def t(broker: Broker) -> str:
    broker.create_topic("t", queues=1)
    broker.create_group("g", backoff_ms=[1], max_attempts=2)
    return "t"


def bodies(n: int) -> pa.Table:
    return pa.table({"body": [str(i).encode() for i in range(n)]})


def table_of(rows: list[dict[str, str]]) -> pa.Table:
    return pa.table(
        {"properties": pa.array([list(row.items()) for row in rows], schema.PROPERTIES)}
    )


# -------------------------------------------------------------------------------------- faults


@pytest.mark.usefixtures("fault")
def test_a_fault_fails_no_send_and_is_logged_once(
    client: Client, t: str, properties: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    assert client.send(t, bodies(2)).num_rows == 2
    assert client.send_async(t, bodies(1)).result(60).num_rows == 1
    client.send_one_way(t, bodies(1))

    until(lambda: len(properties(t)) == 4)
    assert [record.name for record in caplog.records if record.exc_info] == ["rmq_pipeline.tracing"]


@pytest.mark.usefixtures("fault")
def test_a_fault_stops_no_listener(client: Client, t: str) -> None:
    client.send(t, bodies(3))
    heard: list[bytes] = []

    def hear(messages: Any, _context: Any) -> str:
        heard.extend(message.body for message in messages)
        return "success"

    with PushConsumer(client, "g", start_from="first").subscribe("t").listen(hear):
        until(lambda: len(heard) >= 3)
    assert sorted(heard) == [b"0", b"1", b"2"]


@pytest.mark.usefixtures("fault")
def test_a_fault_stops_no_window(client: Client, t: str, properties: Stored) -> None:
    client.create_topic("invoices", queues=1)
    client.send(t, bodies(3))

    def publish(messages: pa.Table, _state: pa.Table) -> Outcome:
        return Outcome(publish={"invoices": messages.select(["body"])})

    spec = ConsumerSpec(name="g", topic=t, group="g", handler=publish, publishes=("invoices",))
    with tracing.window("g", {}):
        report = run_window(spec, client, owner="me", idle_s=0.05, parallelism=1)

    assert (report.acked, report.retried) == (3, 0)
    assert len(properties("invoices")) == 3


@pytest.mark.usefixtures("untraced")
def test_an_unsampled_span_is_passed_on_as_unsampled(
    client: Client, t: str, properties: Stored
) -> None:
    trace.set_tracer_provider(TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False))

    client.send(t, bodies(2))
    with tracing.window("w", {}) as span:
        assert span.trace_id is None

    (context,) = {each["TRACE_CONTEXT"] for each in properties(t)}
    assert not int(context[-2:], 16) & trace.TraceFlags.SAMPLED


# -------------------------------------------------------------------------------------- export


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5000"),
        ("OTEL_BSP_SCHEDULE_DELAY", "0"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"),
    ],
)
def test_a_wrong_variable_is_logged_and_fails_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)

    with span_export.exporting(), tracing.window("w", {}):
        pass

    assert any(record.levelno >= logging.WARNING for record in caplog.records)


@pytest.mark.usefixtures("untraced")
def test_one_of_several_exporters_is_ours(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp, console")

    with span_export.exporting(), tracing.window("w", {}):
        pass

    assert len(collector.spans("window w")) == 1
    assert "not by console" in caplog.text


class Hanging(SpanProcessor):
    """A processor whose flush waits for a collector that never answers."""

    def __init__(self) -> None:
        self.answered = threading.Event()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002
        return self.answered.wait(60)


class FaultyFlush(SpanProcessor):
    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002
        raise FaultError("force_flush")


def provide(processor: SpanProcessor) -> None:
    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(processor)
    trace.set_tracer_provider(made)


@pytest.mark.usefixtures("untraced")
def test_a_flush_that_hangs_delays_the_end_for_a_time_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = Hanging()
    provide(hanging)
    monkeypatch.setattr(span_export, "FLUSH_S", 0.05)
    started = time.monotonic()

    with span_export.exporting():
        pass

    took_s = time.monotonic() - started
    hanging.answered.set()
    assert took_s < 30
    assert "Spans may be lost" in caplog.text


@pytest.mark.usefixtures("untraced")
def test_a_faulty_flush_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    provide(FaultyFlush())

    with span_export.exporting():
        pass

    assert "Spans may be lost" in caplog.text


# ------------------------------------------------------------------------------------ contexts


def test_contexts_of_zeros_take_no_place_among_the_links(traces: Collector) -> None:
    zeros = [{"TRACE_CONTEXT": f"00-{0:032x}-{i + 1:016x}-01"} for i in range(128)]
    zeros += [{"TRACE_CONTEXT": f"00-{i + 1:032x}-{0:016x}-01"} for i in range(128)]
    rows = [*zeros, {"TRACE_CONTEXT": OTHER}]

    (link,) = tracing.links(table_of(rows))
    tracing.begin_call("t", group="g", properties=rows, messages=len(rows), attributes={}).end()

    assert f"{link.context.trace_id:032x}" == OTHER_PLACE[0]
    assert traces.span("process t").links == [OTHER_PLACE]


def test_a_call_stops_reading_contexts_at_the_limit_of_links(traces: Collector) -> None:
    read = 0

    def contexts() -> Iterator[dict[str, str]]:
        nonlocal read
        for i in range(1_000):
            read += 1
            yield {"TRACE_CONTEXT": f"00-{i + 1:032x}-{i + 1:016x}-01"}

    tracing.begin_call("t", group="g", properties=contexts(), messages=1_000, attributes={}).end()

    assert len(traces.span("process t").links) == tracing.MOST_LINKS
    assert read == tracing.MOST_LINKS + 1


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("state", "members"),
    [
        ("vendor=1, t@other=a b", {"vendor": "1", "t@other": "a b"}),
        ("vendor=1,,", {"vendor": "1"}),
        ("california", {}),
        ("vendor=1,a secret of the user", {}),
        ("vendor=ä", {}),
        ("vendor=1\nx", {}),
        (",".join(f"k{i}=1" for i in range(33)), {}),
        ("vendor=" + "1" * 600, {}),
    ],
)
def test_a_text_that_is_no_state_is_dropped_silently(
    caplog: pytest.LogCaptureFixture, state: str, members: dict[str, str]
) -> None:
    (link,) = tracing.links(table_of([{"TRACE_CONTEXT": OTHER, "tracestate": state}]))

    assert dict(link.context.trace_state) == members
    assert not caplog.records


def test_the_producer_is_the_parent_of_a_call_within_another_span(
    tracer: trace.Tracer, traces: Collector
) -> None:
    with tracer.start_as_current_span("poll"):
        tracing.begin_call(
            "t", group="g", properties=[{"TRACE_CONTEXT": OTHER}], messages=1, attributes={}
        ).end()

    call = traces.span("process t")
    assert (call.trace_id, call.parent_id) == OTHER_PLACE
