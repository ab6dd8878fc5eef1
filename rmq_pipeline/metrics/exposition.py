"""The text that Prometheus scrapes, from the table of the verb ``metrics``."""

from collections.abc import Iterator
from typing import Final

import pyarrow as pa
from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from typing_extensions import override

#: Version 0.0.4 of the text format: every Prometheus reads it.
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PARTS: Final = {"": "", "bucket": "_bucket", "sum": "_sum", "count": "_count"}


class TableCollector(Collector):
    """Collector of the samples in one table, for a registry of prometheus_client.

    Args:
        table: declared.SAMPLES; the samples of a metric follow each other.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    @override
    def collect(self) -> Iterator[Metric]:
        """Yield each metric with its samples."""
        columns = [self._table[name].to_pylist() for name in self._table.column_names]
        family: Metric | None = None
        last = None
        for name, kind, part, labels, value, _, text in zip(*columns, strict=True):
            if name != last:
                if family is not None:
                    yield family
                family, last = _family(name, kind, text=text), name
            assert family is not None
            family.add_sample(name + _PARTS[part], dict(labels), value)
        if family is not None:
            yield family


def _family(name: str, kind: str, *, text: str) -> Metric:
    """Return a family without samples; the names in the table have their units already."""
    kinds = {"counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
    family: Metric = kinds.get(kind, GaugeMetricFamily)(name, text, labels=())
    return family


def exposition(table: pa.Table) -> bytes:
    """Return the samples in the Prometheus text format.

    Args:
        table: what the verb ``metrics`` returns.
    """
    return generate_latest(TableCollector(table))
