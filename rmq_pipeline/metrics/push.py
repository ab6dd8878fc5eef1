"""Push of all metrics to an OpenTelemetry collector, by OTLP over HTTP."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import metadata
from typing import Any, Final
from urllib.parse import urlsplit

import pyarrow as pa
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.metrics.declared import METRICS, Metric

log = logging.getLogger(__name__)

#: Time for one push, and for the last one when the broker stops.
_PUSH_S: Final = 10.0
_LAST_PUSH_S: Final = 2.0
#: All instruments of one push observe the same table.
_SAME_S: Final = 1.0


def url_of(endpoint: str) -> str:
    """Return the URL to push to: a collector's base URL gets the path /v1/metrics."""
    parts = urlsplit(endpoint)
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/metrics"


class Push:
    """Periodic push of the samples, from a thread of the SDK.

    Counters and gauges are observable instruments of the declared names. OpenTelemetry has no
    observable histogram, so a histogram is three observable counters: ``…_bucket`` with the
    attribute le, ``…_sum`` and ``…_count``.
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
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], list[Observation]] = {}
        self._seen_until = 0.0
        exporter = OTLPMetricExporter(endpoint=url_of(endpoint), timeout=_PUSH_S)
        self._reader = PeriodicExportingMetricReader(
            exporter,
            export_interval_millis=interval_s * 1000,
            export_timeout_millis=_PUSH_S * 1000,
        )
        described = {
            "service.name": "rmq_pipeline",
            "service.version": metadata.version("rmq_pipeline"),
            "service.instance.id": home,
        }
        provider = MeterProvider(
            [self._reader], resource=Resource.create(described), shutdown_on_exit=False
        )
        self._meter = provider.get_meter("rmq_pipeline")
        for metric in METRICS:
            if metric.type == "histogram":
                for part in ("bucket", "sum", "count"):
                    unit = metric.unit if part == "sum" else ""
                    self._observe(metric, f"{metric.name}_{part}", part=part, unit=unit)
            else:
                self._observe(metric, metric.name, part="", unit=metric.unit)

    def _observe(self, metric: Metric, name: str, *, part: str, unit: str) -> None:
        callbacks: Sequence[Any] = [partial(self._observations, (metric.name, part))]
        create = (
            self._meter.create_observable_counter
            if metric.type != "gauge"
            else self._meter.create_observable_gauge
        )
        create(name, callbacks, unit=unit, description=metric.help)

    def _observations(self, key: tuple[str, str], _: CallbackOptions) -> Iterable[Observation]:
        with self._lock:
            if time.monotonic() >= self._seen_until:
                self._look()
            return self._seen.get(key, ())

    def _look(self) -> None:
        self._seen, self._seen_until = {}, time.monotonic() + _SAME_S
        try:
            table = self._samples()
        except RocketMQError as error:  # the next push tries again
            log.warning("The metrics could not be pushed: %s", error)
            return
        columns = (table[name].to_pylist() for name in ("name", "part", "labels", "value"))
        for name, part, labels, value in zip(*columns, strict=True):
            observed = self._seen.setdefault((name, part), [])
            observed.append(Observation(value, dict(labels)))

    def push_now(self) -> bool:
        """Push, and return True if the collector took it."""
        return bool(self._reader.force_flush(_PUSH_S * 1000))

    def shutdown(self) -> None:
        """Push a last time, within 2 s, and end the thread."""
        self._reader.shutdown(_LAST_PUSH_S * 1000)
