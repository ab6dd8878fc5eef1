"""Push of all metrics to an OpenTelemetry collector, by OTLP over HTTP."""

import logging
import threading
import time
from collections.abc import Callable
from importlib import metadata
from typing import Final
from urllib.parse import urlsplit

import pyarrow as pa
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.metrics.declared import BY_NAME

log = logging.getLogger(__name__)

#: Time for one push, and for the last one when the broker stops.
_PUSH_S: Final = 10.0
_LAST_PUSH_S: Final = 2.0
_SCOPE: Final = InstrumentationScope("rmq_pipeline")


def url_of(endpoint: str) -> str:
    """Return the URL to push to: a collector's base URL gets the path /v1/metrics."""
    parts = urlsplit(endpoint)
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/metrics"


class Push:
    """Periodic push of the samples, from a thread of its own.

    The exporter gets the samples as they are. The SDK's instruments would keep the labels of
    deleted topics and groups, and merge all label sets beyond the first 2,000 of an instrument.

    Counters and gauges have the declared names. A histogram is three counters: ``…_bucket`` with
    the attribute le, ``…_sum`` and ``…_count``.
    """

    def __init__(
        self, endpoint: str, *, interval_s: float, home: str, samples: Callable[[], pa.Table]
    ) -> None:
        """Start pushing.

        Args:
            endpoint: URL of the collector.
            interval_s: time between two pushes.
            home: names the broker, as the resource attribute service.instance.id.
            samples: returns declared.SAMPLES.
        """
        self._samples = samples
        self._interval_s = interval_s
        self._since_ns = time.time_ns()
        self._exporter = OTLPMetricExporter(endpoint=url_of(endpoint), timeout=_PUSH_S)
        self._resource = Resource.create(
            {
                "service.name": "rmq_pipeline",
                "service.version": metadata.version("rmq_pipeline"),
                "service.instance.id": home,
            }
        )
        self._pushing = threading.Lock()
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rmq-push", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._try()
        self._try()

    def _try(self) -> None:
        try:
            self.push_now()
        except RocketMQError as error:  # the next push tries again
            log.warning("The metrics could not be pushed: %s", error)
        except Exception:  # without this thread nothing is pushed again
            log.exception("The metrics could not be pushed.")

    def push_now(self) -> bool:
        """Push, and return True if the collector took it.

        Raises:
            RocketMQError: the broker has no samples, because it is closing.
        """
        with self._pushing:
            if self._ended.is_set():
                return False
            result = self._exporter.export(self._data(self._samples()))
        return result is MetricExportResult.SUCCESS

    def _data(self, table: pa.Table) -> MetricsData:
        """Return samples as the exporter wants them."""
        now_ns = time.time_ns()
        points: dict[tuple[str, str], list[NumberDataPoint]] = {}
        columns = (table[name].to_pylist() for name in ("name", "part", "labels", "value"))
        for name, part, labels, value in zip(*columns, strict=True):
            point = NumberDataPoint(dict(labels), self._since_ns, now_ns, value)
            points.setdefault((name, part), []).append(point)
        metrics = [_metric(name, part, points=found) for (name, part), found in points.items()]
        scope = ScopeMetrics(_SCOPE, metrics, schema_url="")
        return MetricsData([ResourceMetrics(self._resource, [scope], schema_url="")])

    def shutdown(self) -> None:
        """Push a last time, within 2 s, and end the thread."""
        self._stopping.set()
        self._thread.join(_LAST_PUSH_S)
        self._ended.set()
        self._exporter.shutdown()


def _metric(name: str, part: str, *, points: list[NumberDataPoint]) -> Metric:
    declared = BY_NAME[name]
    if declared.type == "gauge":
        return Metric(name, declared.help, declared.unit, Gauge(points))
    counted = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    if declared.type == "counter":
        return Metric(name, declared.help, declared.unit, counted)
    return Metric(f"{name}_{part}", declared.help, declared.unit if part == "sum" else "", counted)
