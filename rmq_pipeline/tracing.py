"""OpenTelemetry spans of producers, consumers and windows, and links between them.

Nothing is done, and no package is imported, unless the process has a tracer provider: its own, or
the one that ``span_export`` makes from OpenTelemetry's environment variables. Attributes and names
are those of OpenTelemetry's semantic conventions for messaging, as far as they apply. An error of
OpenTelemetry is logged; it never fails a send, a call or a window.
"""

import functools
import logging
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits, schema
from rmq_pipeline.message import Int64s, offsets_of, with_properties
from rmq_pipeline.text import said_by, speakable

if TYPE_CHECKING:
    from concurrent.futures import Future

    from opentelemetry.trace import Link, SpanContext, Tracer, TracerProvider

log = logging.getLogger(__name__)

Bools = npt.NDArray[np.bool_]

#: Property of a message: its W3C traceparent, as RocketMQ's own clients send it.
TRACE_CONTEXT: Final = "TRACE_CONTEXT"
#: Property of a message: its W3C tracestate. RocketMQ's protocol has no field for it.
TRACE_STATE: Final = "tracestate"
#: Maximum number of links of a span: the limit of OpenTelemetry's SDK.
MOST_LINKS: Final = 128
#: Longest tracestate that is read. W3C asks for at least this much.
_STATE_LENGTH: Final = 512
_PARENT: Final = r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"
_is_parent: Final = re.compile(_PARENT).fullmatch
#: Kinds of errors that were logged.
_logged: Final[set[type[BaseException]]] = set()
_TRACE_ID: Final = (3, 35)
_SPAN_ID: Final = (36, 52)
_KEY: Final = r"[a-z][-_0-9a-z*/]{0,255}|[a-z0-9][-_0-9a-z*/]{0,240}@[a-z][-_0-9a-z*/]{0,13}"
_VALUE: Final = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_is_member: Final = re.compile(f"(?:{_KEY})=(?:{_VALUE})").fullmatch
#: Maximum number of members of a tracestate, by W3C.
_STATE_MEMBERS: Final = 32
_SCOPE: Final = "rmq_pipeline"
_SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.36.0"
#: Maximum number of failures of a batch that are events of its span, one of each kind.
_FAILURES: Final = 8
_NO_TRACE: Final = "0" * 32
#: Free bytes a row that a batch with contexts leaves: the broker adds columns before it measures.
_SLACK_BYTES: Final = 64


class _Guard:
    """A block whose errors are logged: a faulty processor or sampler must not fail traced work."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if kind is not None and kind not in _logged and issubclass(kind, Exception):
            _logged.add(kind)  # a faulty processor raises at each span
            log.error(
                "OpenTelemetry failed; further errors of this kind are not logged.", exc_info=error
            )
        return isinstance(error, Exception)


class Span:
    """A span under way; without a tracer provider it is NONE, whose methods do nothing.

    As a context manager it ends with the block, and an exception is its failure.
    """

    __slots__ = ("_span",)

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.ended_by(error)
        self.end()

    @property
    def trace_id(self) -> str | None:
        """Id of the trace in hex; None if the span is not recorded."""
        if self._span is None or not self._span.is_recording():
            return None
        return f"{self._span.get_span_context().trace_id:032x}"

    def current(self) -> AbstractContextManager[object]:
        """Make the span the current one of this thread, within a block."""
        span = self._span
        if span is None:
            return _NOTHING
        from opentelemetry import trace

        return trace.use_span(
            span, end_on_exit=False, record_exception=False, set_status_on_exception=False
        )

    def failed(self, error_type: str, reason: str, *, error: BaseException | None = None) -> None:
        """Give the span the status of a failure."""
        if self._span is None:
            return
        with _GUARD:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute("error.type", speakable(error_type))
            self._span.set_status(Status(StatusCode.ERROR, speakable(reason)))
            if error is not None:
                self._tell(error_type, said_by(error), stack=_traceback(error))

    def _tell(self, error_type: str, message: str, *, stack: str) -> None:
        """Add the event of an exception: record_exception fails if the text of an error does."""
        said = {"type": error_type, "message": message, "stacktrace": stack}
        event = {f"exception.{name}": speakable(text) for name, text in said.items()}
        self._span.add_event("exception", event)

    def ended_by(self, error: BaseException) -> None:
        """End the span with an error as its failure."""
        self.failed(type(error).__name__, said_by(error), error=error)
        self.end()

    def settled(self, report: Any) -> None:
        """Set the counts of a settled batch, and one failure of each kind.

        Args:
            report: handling.results.BatchReport.
        """
        if self._span is None:
            return
        counts = {name: getattr(report, name) for name in ("retried", "dead_lettered", "parked")}
        told = report.failures[:_FAILURES]
        with _GUARD:
            self._span.set_attributes({f"rmq.{name}": n for name, n in counts.items() if n})
            for each in told:
                self._tell(each.error_type, each.reason, stack=each.traceback or "")
        if failed := sum(counts.values()):
            kind = told[0].error_type if told else max(counts, key=lambda name: counts[name])
            self.failed(kind, f"{failed} of {report.messages} messages failed")

    @contextmanager
    def publishing(self, tables: Mapping[str, pa.Table]) -> Iterator[dict[str, pa.Table]]:
        """Yield the messages that a batch publishes, by topic, with the contexts of their spans."""
        if self._span is None:
            yield dict(tables)
            return
        with self.current():
            begun = {topic: begin_send(topic, table) for topic, table in tables.items()}
        try:
            yield {topic: table for topic, (_, table) in begun.items()}
        except BaseException as error:
            for span, _ in begun.values():
                span.failed(type(error).__name__, said_by(error))
            raise
        finally:
            for span, _ in begun.values():
                span.end()

    def end_with(self, future: "Future[Any]") -> None:
        """End the span with the outcome of a future that is done."""
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self.ended_by(error)
        self.end()

    def end(self) -> None:
        """End the span; a second call does nothing."""
        span, self._span = self._span, None
        if span is not None:
            with _GUARD:
                span.end()


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))[-limits.TRACEBACK_LENGTH :]
    except Exception:  # noqa: BLE001 - formatting a foreign error may raise anything
        return ""


_GUARD: Final = _Guard()
_NOTHING: Final = nullcontext()
NONE: Final = Span()


def _tracer() -> "Tracer | None":
    """Return a tracer; None unless this process has a tracer provider.

    A provider cannot be set before the module is imported, so its absence answers at no cost.
    """
    if sys.modules.get("opentelemetry.trace") is None:
        return None
    with _GUARD:
        from opentelemetry import trace

        provider = trace.get_tracer_provider()
        if not isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
            return _tracer_of(provider)
    return None


@functools.lru_cache(maxsize=2)
def _tracer_of(provider: "TracerProvider") -> "Tracer":
    return provider.get_tracer(_SCOPE, schema_url=_SCHEMA_URL)


def is_on() -> bool:
    """Return True if this process has a tracer provider."""
    return _tracer() is not None


def _attributes(operation: str, topic: str, *, messages: int) -> dict[str, Any]:
    found = {
        "messaging.system": "rocketmq",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }
    return found if messages == 1 else {**found, "messaging.batch.message_count": messages}


# ----------------------------------------------------------------------------------- producers


def begin_send(topic: str, messages: Any) -> tuple[Span, Any]:
    """Begin the span of a send, and return the messages with its context.

    Args:
        topic: the topic.
        messages: schema.SEND; a message with a context of its own keeps it.
    """
    span, carrying = NONE, messages
    tracer = _tracer()
    with _GUARD:
        if tracer is None:
            carrying = _with_current(messages)
        elif isinstance(messages, pa.Table | pa.RecordBatch):  # the broker refuses others
            table = _table(messages)
            from opentelemetry.trace import SpanKind

            named = speakable(str(topic))
            attributes = _attributes("send", named, messages=table.num_rows)
            begun = tracer.start_span(
                f"send {named}", kind=SpanKind.PRODUCER, attributes=attributes
            )
            span = Span(begun)
            carrying = _carrying(table, begun.get_span_context())
    return span, carrying


def _table(messages: pa.Table | pa.RecordBatch) -> pa.Table:
    return messages if isinstance(messages, pa.Table) else pa.Table.from_batches([messages])


def _with_current(messages: Any) -> Any:
    """Return messages with the context of the current span.

    A process without a provider may pass on the context of another process.
    """
    if sys.modules.get("opentelemetry.trace") is None or not isinstance(messages, pa.Table):
        return messages
    from opentelemetry import trace

    return _carrying(messages, trace.get_current_span().get_span_context())


def _carrying(messages: pa.Table, context: "SpanContext") -> pa.Table:
    """Return messages with a context in those that have none; it is one constant by column."""
    n = messages.num_rows
    if not context.is_valid or not n:
        return messages
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    added = {TRACE_CONTEXT: parent}
    if state := context.trace_state.to_header():
        added[TRACE_STATE] = state
    size = sum(len(name) + len(value) for name, value in added.items())
    if messages.nbytes + n * (size + _offsets_bytes(added) + _SLACK_BYTES) > limits.BATCH_BYTES:
        return messages
    names = {"properties", "tag", "keys"} & set(messages.column_names)
    try:
        held = {name: _one(messages[name], schema.SEND.field(name).type) for name in names}
    except (pa.ArrowException, ValueError, KeyError):  # the broker says what is wrong with it
        return messages
    own = held.pop("properties", None)
    stays = _stays(own, held, n=n, size=size, count=len(added))
    if stays.all():
        return messages
    made = _added(own, added, stays=stays)
    field = schema.SEND.field("properties")
    if own is None:
        return messages.append_column(field, made)
    return messages.set_column(messages.column_names.index(field.name), field, made)


def _offsets_bytes(added: Mapping[str, str]) -> int:
    """Return the bytes of Arrow's offsets for a row: of the row, its names and its values."""
    return np.dtype(np.int32).itemsize * (1 + 2 * len(added))


def _constant(added: Mapping[str, str], n: int) -> pa.MapArray:
    """Return ``n`` rows of the same properties."""
    one = pa.array([list(added.items())], schema.PROPERTIES)
    return one if n == 1 else one.take(pa.array(np.zeros(n, np.int64)))


def _stays(
    own: pa.MapArray | None, others: Mapping[str, pa.Array], *, n: int, size: int, count: int
) -> Bools:
    """Return True for the rows that have a context or state, or too little free space for one."""
    sizes = np.full(n, size, np.int64)
    stays = np.zeros(n, np.bool_)
    if "tag" in others:
        sizes += pc.fill_null(pc.binary_length(others["tag"]), 0).to_numpy()
    if "keys" in others:
        sizes += _bytes(others["keys"].offsets, others["keys"].values)
    if own is not None:
        sizes += _bytes(own.offsets, own.keys) + _bytes(own.offsets, own.items)
        stays |= np.diff(own.offsets.to_numpy()) + count > limits.PROPERTY_COUNT
        for name in (TRACE_CONTEXT, TRACE_STATE):
            if pc.any(pc.equal(own.keys, name)).as_py():  # a lookup in each row is slow
                found = pc.map_lookup(own, name, "first")
                stays |= pc.is_valid(found).to_numpy(zero_copy_only=False)
    stays |= sizes > limits.PROPERTY_BYTES
    return stays


def _added(own: pa.MapArray | None, added: Mapping[str, str], *, stays: Bools) -> pa.MapArray:
    """Return properties with more, except in the rows that stay as they are."""
    n = len(stays)
    if own is None:
        own = pa.nulls(n, schema.PROPERTIES)
    if own.null_count == n:
        made = _constant(added, n)
    else:
        made = with_properties(own, {name: pa.repeat(text, n) for name, text in added.items()})
    if not stays.any():
        return made
    rows = np.where(stays, np.arange(n), n + np.arange(n))
    return pa.concat_arrays([own, made]).take(pa.array(rows))


def _bytes(bounds: pa.Array, texts: pa.Array) -> Int64s:
    """Return the bytes of the texts of each list."""
    if not len(texts):  # an empty array may have no buffer of offsets
        return np.zeros(len(bounds) - 1, np.int64)
    found: Int64s = np.diff(offsets_of(texts)[bounds.to_numpy()]).astype(np.int64)
    return found


def _one(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.Array:
    """Return a column as one array, without the rows around a slice."""
    return pa.concat_arrays([pa.array([], wanted), *column.cast(wanted).chunks])


# ----------------------------------------------------------------------------------- consumers


def begin_batch(messages: pa.Table, *, topic: str, group: str) -> Span:
    """Begin the span of a window's batch, with links to the contexts of its messages.

    It is a child of the window's span: a batch of many producers belongs to none of their traces.

    Args:
        messages: schema.RECEIVED, at least one row.
        topic: the topic.
        group: the consumer group.
    """
    tracer = _tracer()
    if tracer is None:
        return NONE
    with _GUARD:
        from opentelemetry.trace import SpanKind

        attributes = _attributes("process", topic, messages=messages.num_rows)
        attributes["messaging.consumer.group.name"] = group
        if messages.num_rows == 1:
            attributes["messaging.message.id"] = messages["message_id"][0].as_py()
        begun = tracer.start_span(
            f"process {topic}", kind=SpanKind.CONSUMER, attributes=attributes, links=links(messages)
        )
        return Span(begun)
    return NONE


def begin_call(
    topic: str,
    *,
    group: str,
    properties: Iterable[Mapping[str, str]],
    messages: int,
    attributes: Mapping[str, Any],
) -> Span:
    """Begin the span of a call of a listener.

    The span of a call with one message is a child of the producer's span, and has a link to it.
    The span of a call with several messages is a child of the current span, and has a link to
    each producer's span.

    Args:
        topic: the topic.
        group: the consumer group.
        properties: those of the messages.
        messages: their number.
        attributes: more attributes of the span.
    """
    tracer = _tracer()
    if tracer is None:
        return NONE
    with _GUARD:
        from opentelemetry import trace

        found = _links((each.get(TRACE_CONTEXT), each.get(TRACE_STATE)) for each in properties)
        parent = None
        if messages == 1 and found:
            parent = trace.set_span_in_context(trace.NonRecordingSpan(found[0].context))
        named = _attributes("process", topic, messages=messages)
        given = {name: value for name, value in attributes.items() if value is not None}
        begun = tracer.start_span(
            f"process {topic}",
            context=parent,
            kind=trace.SpanKind.CONSUMER,
            attributes={**named, "messaging.consumer.group.name": group, **given},
            links=found,
        )
        return Span(begun)
    return NONE


def links(messages: pa.Table) -> "list[Link]":
    """Return links to the distinct trace contexts of received messages, at most MOST_LINKS.

    For the span of a program that receives or pulls by itself. It needs OpenTelemetry's API.

    Args:
        messages: a table with the column properties: schema.RECEIVED or schema.READ.
    """
    found = [_contexts(chunk) for chunk in messages["properties"].chunks if len(chunk)]
    if not found:
        return []
    both = pa.concat_tables(found).group_by(["parent", "state"], use_threads=False).aggregate([])
    right = both.filter(pc.match_substring_regex(both["parent"], _PARENT))
    for start, stop in (_TRACE_ID, _SPAN_ID):  # RE2 has no lookahead to refuse zeros
        ids = pc.utf8_slice_codeunits(right["parent"], start, stop)
        right = right.filter(pc.not_equal(ids, "0" * (stop - start)))
    first = right.slice(0, MOST_LINKS)
    return _links(zip(first["parent"].to_pylist(), first["state"].to_pylist(), strict=True))


def _contexts(properties: pa.MapArray) -> pa.Table:
    """Return the columns parent and state of the messages that have a context."""
    bounds = properties.offsets
    start, n = bounds[0].as_py(), bounds[-1].as_py() - bounds[0].as_py()
    names, values = properties.keys.slice(start, n), properties.items.slice(start, n)
    if not pc.any(pc.equal(names, TRACE_STATE)).as_py():
        # A lookup in each row takes 50 times as long.
        parents = values.filter(pc.equal(names, TRACE_CONTEXT))
        return pa.table({"parent": parents, "state": pa.nulls(len(parents), pa.string())})
    looked_up = [pc.map_lookup(properties, name, "first") for name in (TRACE_CONTEXT, TRACE_STATE)]
    return pa.table(looked_up, names=["parent", "state"]).filter(pc.is_valid(looked_up[0]))


def _links(contexts: Iterable[tuple[str | None, str | None]]) -> "list[Link]":
    """Return links to the distinct contexts that are valid, at most MOST_LINKS."""
    from opentelemetry import trace

    found: dict[tuple[str | None, str | None], Link] = {}
    for each in contexts:
        if len(found) == MOST_LINKS:
            break
        context = None if each in found else _parsed(*each)
        if context is not None:
            found[each] = trace.Link(context)
    return list(found.values())


def _parsed(parent: str | None, state: str | None) -> "SpanContext | None":
    """Return the context that a message has; None if its text is no traceparent."""
    if parent is None or not _is_parent(parent):
        return None
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {"traceparent": parent}
    if state and _is_state(state):
        carrier["tracestate"] = state
    within = TraceContextTextMapPropagator().extract(carrier)
    found = trace.get_current_span(within).get_span_context()
    return found if found.is_valid else None


def _is_state(text: str) -> bool:
    """Return True for a tracestate of W3C; OpenTelemetry logs the text of any other."""
    members = [each.strip(" \t") for each in text[: _STATE_LENGTH + 1].split(",")]
    return (
        len(text) <= _STATE_LENGTH
        and len(members) <= _STATE_MEMBERS
        and all(not each or _is_member(each) for each in members)
    )


# ------------------------------------------------------------------------------------- windows


@contextmanager
def window(name: str, attributes: Mapping[str, str]) -> Iterator[Span]:
    """Make a span ``window <name>`` the current one within a block."""
    tracer = _tracer()
    if tracer is None:
        yield NONE
        return
    span = NONE
    with _GUARD:
        span = Span(tracer.start_span(f"window {name}", attributes=attributes))
    with span, span.current():
        yield span


# --------------------------------------------------------------------------------------- pages


def trace_id_of(properties: Mapping[str, str]) -> str | None:
    """Return the trace id in a message's properties; None if it has no valid one."""
    found = properties.get(TRACE_CONTEXT) or ""
    trace_id = found[3:35] if _is_parent(found) else _NO_TRACE
    return trace_id if trace_id != _NO_TRACE else None


def trace_url(template: str | None, trace_id: str | None) -> str | None:
    """Return the address of a trace; None without a template or a trace.

    Args:
        template: the setting ``trace_url``.
        trace_id: 32 hex digits.
    """
    if not template or trace_id is None:
        return None
    return template.replace("{trace_id}", trace_id)
