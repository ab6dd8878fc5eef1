"""A collector that speaks OTLP over HTTP, in the test's process, and what it was sent."""

import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

#: The answer to metrics and spans alike, as a message without fields.
_ANSWER = b""


@dataclass(frozen=True)
class Seen:
    """A span as the collector got it; ids in hex."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    links: list[tuple[str, str]]
    attributes: dict[str, Any]
    #: The description of a failure; None for a span that did not fail.
    failure: str | None
    events: list[dict[str, Any]] = field(default_factory=list)
    service: str = ""

    @property
    def place(self) -> tuple[str, str]:
        """Trace id and span id, as a link to the span has them."""
        return self.trace_id, self.span_id


class Collector:
    """A server that keeps the requests that it was sent."""

    def __init__(self) -> None:
        #: Requests with metrics.
        self.requests: list[Any] = []
        #: Requests with spans.
        self.traces: list[Any] = []
        self.paths: list[str] = []
        self.status = 200
        came = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                came.paths.append(self.path)
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path.endswith("/traces"):
                    came.traces.append(ExportTraceServiceRequest.FromString(raw))
                else:
                    came.requests.append(ExportMetricsServiceRequest.FromString(raw))
                self.send_response(came.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(_ANSWER)))
                self.end_headers()
                self.wfile.write(_ANSWER)

            def log_message(self, format: str, *args: Any) -> None:
                """Stay silent."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def values(self) -> dict[tuple[str, frozenset[tuple[str, str]]], tuple[str, float]]:
        """Kind and value by name and attributes, as the last request with metrics has them."""
        found = {}
        for metric in self.requests[-1].resource_metrics[0].scope_metrics[0].metrics:
            kind = metric.WhichOneof("data")
            for point in getattr(metric, kind).data_points:
                value = getattr(point, point.WhichOneof("value"))
                labels = frozenset((a.key, a.value.string_value) for a in point.attributes)
                found[metric.name, labels] = (kind, float(value))
        return found

    def spans(self, name: str = "") -> list[Seen]:
        """The spans of this name, or all, in the order in which they ended."""
        found = [
            _seen(span, service=_attributes(resource.resource.attributes).get("service.name", ""))
            for request in list(self.traces)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        return [span for span in found if name in ("", span.name)]

    def span(self, name: str) -> Seen:
        """The one span of this name."""
        (found,) = self.spans(name)
        return found


def _seen(span: Any, *, service: str) -> Seen:
    return Seen(
        name=span.name,
        kind=type(span).SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        attributes=_attributes(span.attributes),
        failure=span.status.message if span.status.code == 2 else None,
        events=[_attributes(event.attributes) for event in span.events],
        service=service,
    )


def _attributes(found: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in found}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
