"""Contexts in messages near a limit: no send and no window fails because it is traced."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from opentelemetry import trace

from rmq_pipeline import limits, schema
from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.window import run_window
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.tracing import begin_send
from tests.tracing.collector import Collector
from tests.tracing.conftest import Stored

ROWS = 1_000


@pytest.fixture
def t(broker: Broker) -> str:
    broker.create_topic("t", queues=1)
    broker.create_group("g", backoff_ms=[1], max_attempts=2)
    return "t"


def bodies(n: int, size: int = 1) -> pa.Table:
    return pa.table({"body": pa.array([b"x" * size] * n)})


# Bodies of these sizes fit into a batch without contexts, but not with them: at the first sizes
# the texts of the contexts fit, and Arrow's offsets do not.
@pytest.mark.parametrize("size", [890, 970, 980, 1_000])
@pytest.mark.usefixtures("provider")
def test_a_batch_near_the_limit_is_sent_without_contexts(
    client: Client, t: str, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(limits, "BATCH_BYTES", 1 << 20)

    assert client.send(t, bodies(ROWS, size)).num_rows == ROWS


@pytest.mark.parametrize("size", [915, 920, 940])
@pytest.mark.parametrize("limit", ["BATCH_BYTES", "SETTLE_BYTES"])
@pytest.mark.usefixtures("provider")
def test_a_window_near_a_limit_publishes_all(
    client: Client,
    t: str,
    properties: Stored,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    size: int,
) -> None:
    client.create_topic("invoices", queues=1)
    client.send(t, bodies(1))
    spare = 256 * ROWS if limit == "SETTLE_BYTES" else 0
    monkeypatch.setattr(limits, limit, (1 << 20) + spare)
    calls = []

    def publish(messages: pa.Table, _state: pa.Table) -> Outcome:
        calls.append(messages.num_rows)
        return Outcome(publish={"invoices": bodies(ROWS, size)})

    spec = ConsumerSpec(name="g", topic=t, group="g", handler=publish, publishes=("invoices",))
    report = run_window(spec, client, owner="me", idle_s=0.05, parallelism=1)

    assert (report.acked, report.retried, report.dead_lettered) == (1, 0, 0)
    assert calls == [1]
    assert len(properties("invoices")) == ROWS


LARGE_TAG = pa.array(["t" * (limits.PROPERTY_BYTES - 30), "small"])
LARGE_KEYS = pa.array([["k" * (limits.PROPERTY_BYTES - 30)], ["small"]], schema.KEYS)
NO_PROPERTIES = pa.nulls(2, schema.PROPERTIES)
EMPTY = pa.array([[], []], schema.PROPERTIES)


@pytest.mark.parametrize("own", [None, NO_PROPERTIES, EMPTY], ids=["none", "null", "empty"])
@pytest.mark.parametrize(
    ("name", "column"), [("tag", LARGE_TAG), ("keys", LARGE_KEYS)], ids=["tag", "keys"]
)
@pytest.mark.usefixtures("provider")
def test_a_large_tag_or_key_leaves_no_space_for_a_context(
    client: Client, t: str, properties: Stored, name: str, column: pa.Array, own: Any
) -> None:
    table = bodies(2).append_column(name, column)
    if own is not None:
        table = table.append_column(schema.SEND.field("properties"), own)

    client.send(t, table)

    large, small = properties(t)
    assert large == {}
    assert set(small) == {"TRACE_CONTEXT"}


def test_a_state_of_ones_own_stays_without_our_context(traces: Collector) -> None:
    context = trace.SpanContext(
        7, 8, is_remote=True, trace_flags=trace.TraceFlags(1),
        trace_state=trace.TraceState([("vendor", "1")]),
    )  # fmt: skip
    own = pa.array([[("tracestate", "california")], [("a", "b")]], schema.PROPERTIES)
    table = bodies(2).append_column(schema.SEND.field("properties"), own)

    with trace.use_span(trace.NonRecordingSpan(context)):
        span, carrying = begin_send("t", table)
    span.end()

    users, other = (dict(each) for each in carrying["properties"].to_pylist())
    assert users == {"tracestate": "california"}
    assert (set(other), other["tracestate"]) == ({"a", "TRACE_CONTEXT", "tracestate"}, "vendor=1")
    assert traces.span("send t").trace_id in other["TRACE_CONTEXT"]
