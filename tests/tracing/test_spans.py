"""Spans of producers and consumers, as a collector gets them by OTLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry import trace

from rmq_pipeline import limits, schema, tracing
from rmq_pipeline.broker import Broker
from rmq_pipeline.consumer.push_consumer import PushConsumer
from rmq_pipeline.consumer.window import run_window
from rmq_pipeline.errors import TopicNotFoundError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.handler import Handler, Outcome
from rmq_pipeline.handling.results import WindowReport
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.rocketmq.grpc_endpoint import GrpcEndpoint
from tests.conformance import raw
from tests.conformance.raw import Raw
from tests.tracing.collector import Collector
from tests.tracing.conftest import Stored
from tests.waiting import until

OTHER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OTHER_PLACE = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
BAD = [
    "",
    "no context",
    "x" * 10_000,
    OTHER.upper(),
    f"{OTHER}-more",
    "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
    "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
]

Tracer = trace.Tracer


def bodies(n: int, properties: Sequence[dict[str, str] | None] | None = None) -> pa.Table:
    table = pa.table({"body": [str(i).encode() for i in range(n)]})
    if properties is None:
        return table
    own = [None if each is None else list(each.items()) for each in properties]
    return table.append_column("properties", pa.array(own, schema.PROPERTIES))


@pytest.fixture
def t(broker: Broker) -> str:
    broker.create_topic("t", queues=1)
    broker.create_group("g", backoff_ms=[1], max_attempts=2)
    return "t"


# ----------------------------------------------------------------------------------- producers


@pytest.mark.parametrize("n", [1, 1_000])
def test_a_send_has_a_span_that_each_message_carries(
    client: Client, t: str, tracer: Tracer, traces: Collector, properties: Stored, n: int
) -> None:
    with tracer.start_as_current_span("checkout"):
        client.send(t, bodies(n))

    sent, above = traces.span("send t"), traces.span("checkout")
    assert (sent.kind, sent.trace_id, sent.parent_id) == (
        "PRODUCER", above.trace_id, above.span_id,
    )  # fmt: skip
    about = sent.attributes
    assert about["messaging.system"] == "rocketmq"
    assert about["messaging.operation.name"] == about["messaging.operation.type"] == "send"
    assert about["messaging.destination.name"] == "t"
    assert about.get("messaging.batch.message_count") == (None if n == 1 else n)
    contexts = {each["TRACE_CONTEXT"] for each in properties(t)}
    assert len(properties(t)) == n
    assert [each[3:52] for each in contexts] == ["-".join(sent.place)]


def test_a_context_of_ones_own_stays(
    client: Client, t: str, traces: Collector, properties: Stored
) -> None:
    client.send(t, bodies(4, [{"a": "b"}, {"TRACE_CONTEXT": OTHER, "c": "d"}, None, {}]))

    first, own, third, last = properties(t)
    ours = first.pop("TRACE_CONTEXT")
    assert traces.span("send t").trace_id in ours
    assert first == {"a": "b"}
    assert own == {"TRACE_CONTEXT": OTHER, "c": "d"}
    assert third == last == {"TRACE_CONTEXT": ours}


@pytest.mark.usefixtures("provider")
def test_a_message_at_the_limits_is_sent_without_a_context(
    client: Client, t: str, properties: Stored
) -> None:
    many = {f"k{i}": "" for i in range(limits.PROPERTY_COUNT)}
    large = {"x": "y" * (limits.PROPERTY_BYTES - 1 - len("tag") - len("key"))}
    table = bodies(3, [many, large, {"x": "y"}])
    table = table.append_column("tag", pa.array(["tag"] * 3))
    table = table.append_column("keys", pa.array([["key"]] * 3, schema.KEYS))

    client.send(t, table)

    assert properties(t)[:2] == [many, large]
    assert set(properties(t)[2]) == {"x", "TRACE_CONTEXT"}


@pytest.mark.usefixtures("provider")
def test_vendors_state_goes_with_the_context(client: Client, t: str, properties: Stored) -> None:
    state = trace.TraceState([("vendor", "1"), ("other", "2")])
    context = trace.SpanContext(
        7, 8, is_remote=True, trace_flags=trace.TraceFlags(1), trace_state=state
    )

    with trace.use_span(trace.NonRecordingSpan(context)):
        client.send(t, bodies(2, [{"a": "b"}, None]))

    assert [each["tracestate"] for each in properties(t)] == ["vendor=1,other=2"] * 2
    (link,) = tracing.links(client.read(t, 0, offset=0, limit=10))
    assert dict(link.context.trace_state) == {"vendor": "1", "other": "2"}


@pytest.mark.parametrize(
    ("made", "rows"),
    [
        (lambda table: table.to_batches()[0], slice(None)),
        (lambda table: table.slice(1, 4), slice(1, 5)),
        (lambda table: table.to_batches()[0].slice(1, 4), slice(1, 5)),
        (lambda table: pa.concat_tables([table.slice(0, 3), table.slice(3)]), slice(None)),
        (lambda table: pa.concat_tables([table.slice(1, 2), table.slice(4, 2)]), [1, 2, 4, 5]),
    ],
    ids=["batch", "slice", "slice of a batch", "chunks", "chunks of slices"],
)
def test_batches_slices_and_chunks_carry_it(
    client: Client, t: str, traces: Collector, properties: Stored, made: Any, rows: Any
) -> None:
    own = [{"a": "0"}, None, {"a": "2", "b": "x"}, {}, {"TRACE_CONTEXT": OTHER}, {"c": "5"}]

    client.send(t, made(bodies(len(own), own)))

    ours = {"TRACE_CONTEXT": properties(t)[0]["TRACE_CONTEXT"]}
    wanted = [{**ours, **(each or {})} for each in own]
    sent = wanted[rows] if isinstance(rows, slice) else [wanted[i] for i in rows]
    assert properties(t) == sent
    assert ours["TRACE_CONTEXT"][3:52] == "-".join(traces.span("send t").place)


def test_a_refused_send_is_a_failed_span(client: Client, traces: Collector) -> None:
    with pytest.raises(TopicNotFoundError):
        client.send("nowhere", bodies(1))

    found = traces.span("send nowhere")
    assert found.failure
    assert "nowhere" in found.failure
    assert found.attributes["error.type"] == "TopicNotFoundError"


def test_sends_in_the_background_belong_to_the_span_that_asked(
    client: Client, t: str, tracer: Tracer, traces: Collector, properties: Stored
) -> None:
    with tracer.start_as_current_span("one"):
        client.send_async(t, bodies(1)).result(60)
    with tracer.start_as_current_span("two"):
        client.send_one_way(t, bodies(1))
    until(lambda: len(properties(t)) == 2)

    until(lambda: len(traces.spans("send t")) == 2)
    asked = [traces.span(name).trace_id for name in ("one", "two")]
    assert [each["TRACE_CONTEXT"][3:35] for each in properties(t)] == asked
    # A future has its result before its span ends, so the second span may end first.
    assert sorted(span.trace_id for span in traces.spans("send t")) == sorted(asked)


def test_a_refused_send_in_the_background_is_a_failed_span(
    client: Client, traces: Collector
) -> None:
    with pytest.raises(TopicNotFoundError):
        client.send_async("nowhere", bodies(1)).result(60)

    until(lambda: len(traces.spans("send nowhere")) == 1)
    found = traces.span("send nowhere")
    assert found.attributes["error.type"] == "TopicNotFoundError"
    assert found.failure is not None


def test_half_messages_carry_it(client: Client, traces: Collector) -> None:
    client.create_topic("pay", type="transaction", queues=1)

    with client.transaction("pay", bodies(1), producer_group="p"):
        pass

    (found,) = client.read("pay", 0, offset=0, limit=1)["properties"].to_pylist()
    assert dict(found)["TRACE_CONTEXT"][3:52] == "-".join(traces.span("send pay").place)


@pytest.mark.usefixtures("untraced")
def test_without_a_provider_a_foreign_context_is_passed_on(
    client: Client, t: str, properties: Stored
) -> None:
    context = trace.SpanContext(7, 8, is_remote=True, trace_flags=trace.TraceFlags(1))

    client.send(t, bodies(1))
    with trace.use_span(trace.NonRecordingSpan(context)):
        client.send(t, bodies(1))

    assert properties(t) == [{}, {"TRACE_CONTEXT": f"00-{7:032x}-{8:016x}-01"}]


# ----------------------------------------------------------------------------------- consumers


def consumed(client: Client, listener: Callable[..., Any], n: int, **options: Any) -> None:
    """Have a listener called until it was given n messages."""
    given: list[Any] = []

    def hear(messages: Any, context: Any) -> Any:
        try:
            return listener(messages, context)
        finally:
            given.extend(messages)

    consumer = PushConsumer(client, "g", start_from="first", **options)
    with consumer.subscribe("t").listen(hear):
        until(lambda: len(given) >= n)


def test_a_call_with_one_message_is_a_child_of_its_producer(
    client: Client, t: str, tracer: Tracer, traces: Collector
) -> None:
    def handle(_messages: Any, _context: Any) -> str:
        tracer.start_span("insert").end()
        return "success"

    sent = client.send(t, bodies(1))
    consumed(client, handle, 1)

    producer, call = traces.span("send t"), traces.span("process t")
    assert (call.kind, call.trace_id, call.parent_id) == ("CONSUMER", *producer.place)
    assert call.links == [producer.place]
    assert call.failure is None
    assert call.attributes["messaging.consumer.group.name"] == "g"
    assert call.attributes["messaging.message.id"] == sent["message_id"][0].as_py()
    assert call.attributes["messaging.destination.partition.id"] == "0"
    assert traces.span("insert").parent_id == call.span_id


def test_a_failed_call_is_a_failed_span(client: Client, t: str, traces: Collector) -> None:
    def fail(messages: Any, _context: Any) -> str:
        if messages[0].delivery_attempt == 1:
            raise ValueError("gate 7 is shut")
        return "success"

    client.send(t, bodies(1))
    consumed(client, fail, 2)

    failed, done = traces.spans("process t")
    assert (failed.failure, failed.attributes["error.type"]) == ("gate 7 is shut", "ValueError")
    assert failed.events[0]["exception.message"] == "gate 7 is shut"
    assert (done.failure, done.attributes["rmq.delivery_attempt"]) == (None, 2)
    assert failed.trace_id == done.trace_id


@pytest.mark.parametrize(
    "properties", [{"TRACE_CONTEXT": None}, {"TRACE_CONTEXT": OTHER, "tracestate": None}]
)
def test_a_property_of_null_is_no_error(traces: Collector, properties: Any) -> None:
    span = tracing.begin_call("t", group="g", properties=[properties], messages=1, attributes={})
    span.end()

    links = [OTHER_PLACE] if properties["TRACE_CONTEXT"] else []
    assert traces.span("process t").links == links
    column = pa.array([list(properties.items()), None, []], schema.PROPERTIES)
    assert len(tracing.links(pa.table({"properties": column}))) == len(links)


class MuteError(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("mute")


def test_an_error_without_a_text_fails_its_call_alone(
    client: Client, t: str, traces: Collector
) -> None:
    def fail(messages: Any, _context: Any) -> str:
        if messages[0].body == b"0":
            raise MuteError
        return "success"

    client.send(t, bodies(2))
    consumed(client, fail, 3)

    until(lambda: len(traces.spans("process t")) == 3)
    kinds = [span.attributes.get("error.type") for span in traces.spans("process t")]
    assert sorted(map(str, kinds)) == ["MuteError", "MuteError", "None"]


def test_a_call_with_several_messages_is_linked_with_each_producer(
    client: Client, t: str, traces: Collector
) -> None:
    own = [{"TRACE_CONTEXT": OTHER}, *({"TRACE_CONTEXT": bad} for bad in BAD), None]
    client.send(t, bodies(len(own), own))

    consumed(client, lambda *_: "success", len(own), batch=32)

    call, sent = traces.span("process t"), traces.span("send t")
    assert call.links == [OTHER_PLACE, sent.place]
    assert call.trace_id not in (OTHER_PLACE[0], sent.trace_id)
    assert call.attributes["messaging.batch.message_count"] == len(own)


def test_a_grpc_producer_and_a_grpc_consumer_join(
    broker: Broker, client: Client, t: str, tracer: Tracer, traces: Collector
) -> None:
    endpoint = GrpcEndpoint(broker)
    try:
        with Raw(endpoint.address) as official:
            official("SendMessage", raw.sends(raw.message(t, trace_context=OTHER)))
            consumed(client, lambda *_: "success", 1)
            assert traces.span("process t").trace_id == OTHER_PLACE[0]
            assert traces.span("process t").links == [OTHER_PLACE]

            with tracer.start_as_current_span("ours"):
                client.send(t, bodies(1))
            (message,) = raw.received(official("ReceiveMessage", raw.receives(t, "g")))
    finally:
        endpoint.shutdown()

    theirs = message.system_properties.trace_context
    assert theirs[3:52] == "-".join(traces.span("send t").place)
    assert not message.user_properties


# ------------------------------------------------------------------------------------- windows


Run = Callable[..., WindowReport]


@pytest.fixture
def run(client: Client, t: str) -> Run:
    def once(handler: Handler, **settings: Any) -> WindowReport:
        client.ensure_topic("published", queues=1)
        spec = ConsumerSpec(
            name="g", topic=t, group="g", handler=handler, publishes=("published",), **settings
        )
        return run_window(spec, client, owner="me", idle_s=0.3, parallelism=2)

    return once


def forward(messages: pa.Table, _state: pa.Table) -> Outcome:
    trace.get_tracer("user").start_span("look up").end()
    return Outcome(publish={"published": messages.select(["body"])})


def test_a_batch_is_linked_with_its_producers_and_is_the_parent_of_its_work(
    client: Client,
    t: str,
    run: Run,
    tracer: Tracer,
    traces: Collector,
    properties: Stored,
) -> None:
    client.send(t, bodies(3))
    client.send(t, bodies(1, [{"TRACE_CONTEXT": OTHER}]))

    with tracer.start_as_current_span("above"):
        report = run(forward)

    assert report.acked == 4
    batch, sent = traces.span("process t"), traces.spans("send t")
    assert batch.links == [sent[0].place, OTHER_PLACE]
    assert (batch.trace_id, batch.parent_id) == traces.span("above").place
    assert batch.attributes["messaging.batch.message_count"] == 4
    assert batch.failure is None
    assert {span.parent_id for span in traces.spans("look up")} == {batch.span_id}
    published = traces.span("send published")
    assert (published.parent_id, published.kind) == (batch.span_id, "PRODUCER")
    assert {p["TRACE_CONTEXT"][3:52] for p in properties("published")} == {
        "-".join(published.place)
    }


@pytest.mark.usefixtures("provider")
def test_a_batch_has_128_links_at_most_and_none_of_bad_texts(client: Client, t: str) -> None:
    own = [{"TRACE_CONTEXT": bad} for bad in BAD[:-3] * 60]
    own += [{"TRACE_CONTEXT": f"00-{i + 1:032x}-{i + 1:016x}-01"} for i in range(200) for _ in "12"]
    client.send(t, bodies(len(own), own))

    table = client.read(t, 0, offset=0, limit=len(own))
    found = tracing.links(table)

    places = [(link.context.trace_id, link.context.span_id) for link in found]
    assert len(set(places)) == len(places) == tracing.MOST_LINKS
    assert set(places) <= {(i + 1, i + 1) for i in range(200)}
    assert tracing.links(table.slice(0, 0)) == []
    assert len(tracing.links(table.slice(len(own) - 4))) == 2


def test_failures_of_a_batch_are_told_by_its_span(
    client: Client, t: str, run: Run, traces: Collector
) -> None:
    def fail(messages: pa.Table, _state: pa.Table) -> Outcome:
        if b"1" in messages["body"].to_pylist():
            raise ValueError("no such order")
        return Outcome()

    client.send(t, bodies(3))
    run(fail)

    first = traces.spans("process t")[0]
    assert first.attributes["error.type"] == "ValueError"
    assert first.attributes["rmq.retried"] == 1
    assert first.failure == "1 of 3 messages failed"
    (event,) = first.events
    assert (event["exception.type"], "no such order" in event["exception.message"]) == (
        "ValueError", True,
    )  # fmt: skip
    assert "fail" in event["exception.stacktrace"]


def test_a_batch_that_is_not_settled_has_a_failed_span(
    client: Client,
    t: str,
    run: Run,
    traces: Collector,
    properties: Stored,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settle = client.settle

    def take_over_first(*args: Any, **settings: Any) -> dict[str, Any]:
        client.open_window("consumer/g", owner="other", duration_ms=60_000, takeover=True)
        return settle(*args, **settings)

    # A handler that takes over would be too early: the next receive may be the verb that is fenced.
    monkeypatch.setattr(client, "settle", take_over_first)
    client.send(t, bodies(1))

    assert run(forward).ended == "fenced"

    batch, published = traces.span("process t"), traces.span("send published")
    for span in (batch, published):
        assert span.attributes["error.type"] == "FencedError"
        assert span.failure is not None
    assert published.parent_id == batch.span_id
    assert properties("published") == []
