"""Latency histograms that clients measure and send every minute, as OTLP."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality

from rmq_pipeline import limits
from rmq_pipeline.errors import AccessError, RequestError, RocketMQError
from rmq_pipeline.rocketmq.clients import Caller
from rmq_pipeline.rocketmq.context import Context

SERVICE: Final = "opentelemetry.proto.collector.metrics.v1.MetricsService"
#: Histograms that are kept; the least recently updated one goes first.
_KEPT: Final = 10_000
#: Maximum buckets of one histogram, and characters of a name or a value.
_BUCKETS: Final = 256
_TEXT: Final = 255


class Series(NamedTuple):
    """Metric and labels of a histogram, without the client."""

    metric: str
    topic: str
    consumer_group: str
    invocation_status: str


@dataclass(slots=True)
class Histogram:
    """Counts of values; bucket i holds those up to bounds[i], the last one the rest."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add counts of the same buckets, and the sum of their values."""
        before = self.counts or [0] * len(counts)
        self.counts = [one + other for one, other in zip(before, counts, strict=True)]
        self.total += total

    def quantile(self, share: float) -> float:
        """Return the ``share`` quantile, interpolated within its bucket; 0 without values."""
        wanted, seen = share * sum(self.counts), 0
        for at, count in enumerate(self.counts):
            if count and seen + count >= wanted:
                low = self.bounds[at - 1] if at else 0.0
                high = self.bounds[at] if at < len(self.bounds) else low
                return low + (high - low) * (wanted - seen) / count
            seen += count
        return 0.0


class Metrics:
    """Histograms by client and series. Used by the loop's thread; ``report`` by any."""

    def __init__(self, context: Context) -> None:
        self._latest: OrderedDict[tuple[str, Series], Histogram] = OrderedDict()
        context.bridge.engine.reports["client_latencies"] = self.report

    def handlers(self, identify: Callable[[Any], Caller]) -> Any:
        """Return the handler for gRPC's server; ``identify`` returns a call's caller or raises."""

        async def export(raw: bytes, call: Any) -> bytes:
            try:
                caller = identify(call)
                if len(raw) > limits.GRPC_OTHER_BYTES:
                    raise RequestError(
                        f"The metrics take {len(raw)} bytes; the limit is"
                        f" {limits.GRPC_OTHER_BYTES}."
                    )
                self.take(ExportMetricsServiceRequest.FromString(raw), caller.client_id)
            except AccessError as error:
                await call.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            except (RocketMQError, DecodeError) as error:
                await call.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            reply: bytes = ExportMetricsServiceResponse().SerializeToString()
            return reply

        method = grpc.unary_unary_rpc_method_handler(export)
        return grpc.method_handlers_generic_handler(SERVICE, {"Export": method})

    def take(self, request: Any, client_id: str) -> None:
        """Store the histograms of a request, and ignore other metrics."""
        for metric in _metrics(request):
            delta = (
                metric.histogram.aggregation_temporality
                == AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
            )
            for point in metric.histogram.data_points:
                if _is_sound(point):
                    self._put((client_id, _series(metric, point)), point, delta=delta)

    def _put(self, key: tuple[str, Series], point: Any, *, delta: bool) -> None:
        bounds = tuple(point.explicit_bounds)
        known = self._latest.pop(key, None)
        if known is None or not delta or known.bounds != bounds:
            known = Histogram(bounds)
        known.add(list(point.bucket_counts), point.sum)
        self._latest[key] = known
        if len(self._latest) > _KEPT:
            self._latest.popitem(last=False)

    def report(self) -> list[dict[str, Any]]:
        """Return the histograms of all clients merged, one row per series; values in ms."""
        together: dict[Series, Histogram] = {}
        clients: dict[Series, int] = {}
        for (_, series), histogram in list(self._latest.items()):
            whole = together.setdefault(series, Histogram(histogram.bounds))
            if whole.bounds == histogram.bounds:
                whole.add(histogram.counts, histogram.total)
                clients[series] = clients.get(series, 0) + 1
        return [
            {
                **series._asdict(),
                "clients": clients[series],
                "count": (count := sum(whole.counts)),
                "mean_ms": round(whole.total / count, 3) if count else 0.0,
                "p50_ms": round(whole.quantile(0.5), 3),
                "p99_ms": round(whole.quantile(0.99), 3),
            }
            for series, whole in sorted(together.items())
        ]


def _metrics(request: Any) -> Iterator[Any]:
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            yield from scope.metrics


def _is_sound(point: Any) -> bool:
    buckets, bounds = len(point.bucket_counts), list(point.explicit_bounds)
    if not all(map(math.isfinite, (point.sum, *bounds))):
        return False
    return 0 < buckets <= _BUCKETS and buckets == len(bounds) + 1 and bounds == sorted(bounds)


def _series(metric: Any, point: Any) -> Series:
    said = {one.key: one.value.string_value[:_TEXT] for one in point.attributes}
    names = Series._fields[1:]
    return Series(metric.name[:_TEXT], *(said.get(name, "") for name in names))
