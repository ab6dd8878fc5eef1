"""Export of a run's spans to a collector, as OpenTelemetry's environment variables say."""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rmq_pipeline import tracing

log = logging.getLogger(__name__)

#: Maximum seconds for which the end of a run waits for the collector.
FLUSH_S: Final = 10.0
#: The protocol of the exporter that the extra otel installs.
_PROTOCOL: Final = "http/protobuf"
_SERVICE: Final = "rmq_pipeline"


@contextmanager
def exporting() -> Iterator[None]:
    """Export the spans of a block as OpenTelemetry's environment variables say.

    A tracer provider that the process has already, wins. The end of the block exports all spans,
    because the process of a run may exit at once. An error is logged, and fails no run.
    """
    try:
        _provide()
    except Exception:
        log.warning("Spans are not exported. Check the variables OTEL_*.", exc_info=True)
    try:
        yield
    finally:
        _flush()


def _flush() -> None:
    """Export all spans, but wait for FLUSH_S at most: the SDK takes its timeout for each request.

    At each request it sends 512 spans.
    """
    if not tracing.is_on():
        return
    # A daemon: the end of the process does not wait for it.
    thread = threading.Thread(target=_force_flush, name="rmq-spans", daemon=True)
    thread.start()
    thread.join(FLUSH_S)
    if thread.is_alive():
        log.warning("Spans may be lost: the collector took over %g s.", FLUSH_S)


def _force_flush() -> None:
    try:
        from opentelemetry import trace

        flush = getattr(trace.get_tracer_provider(), "force_flush", None)
        if flush is not None:
            flush()
    except Exception:
        log.warning("Spans may be lost.", exc_info=True)


def _provide() -> None:
    """Set the tracer provider that the environment wants, unless the process has one."""
    if not _is_asked() or tracing.is_on():
        return
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next(filter(None, map(_variable, names)), _PROTOCOL)
    if protocol != _PROTOCOL:
        log.warning("Spans are not exported by %s. Set %s=%s.", protocol, names[1], _PROTOCOL)
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning("Spans are not exported: %s. Install rmq_pipeline[otel].", error)
        return
    resource = Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": _SERVICE}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def _is_asked() -> bool:
    """Return True if the environment names a collector, and asks for spans there."""
    named = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    is_off = _variable("OTEL_SDK_DISABLED").lower() == "true"
    if is_off or not any(map(_variable, named)):
        return False
    exporters = {each.strip() for each in _variable("OTEL_TRACES_EXPORTER").split(",")} - {""}
    if others := exporters - {"otlp", "none"}:
        log.warning("Windows export spans by otlp only, not by %s.", ", ".join(sorted(others)))
    return not exporters or "otlp" in exporters


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()
