"""What Dagster sees of a consumer's window: observations while it runs, totals at its end."""

import time
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration import plot
from rmq_pipeline.spark.consumer import BatchReport, ConsumerSpec, WindowReport

#: At most one observation in this time.
OBSERVE_EVERY_S: Final = 2.0
_TOTALS: Final = (
    "messages",
    "acked",
    "retried",
    "dead_lettered",
    "parked",
    "released",
    "rows",
    "files",
    "bytes",
)


@dataclass(frozen=True)
class _Point:
    """The state of a window at one moment."""

    at_s: float
    messages: int
    lag: int


class ConsumerWatch:
    """Watches one window."""

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        client: Client,
        *,
        spec: ConsumerSpec,
        key: dg.AssetKey,
    ) -> None:
        self._context, self._client, self._spec, self._key = context, client, spec, key
        self._began = time.monotonic()
        self._points = [_Point(0.0, 0, self._lag())]
        self._sum = dict.fromkeys((*_TOTALS, "batches"), 0)

    def batch(self, report: BatchReport) -> None:
        """Note a micro-batch; an observation, unless the last one was a moment ago."""
        self._sum["batches"] += 1
        for name in _TOTALS:
            self._sum[name] += getattr(report, name)
        at_s = time.monotonic() - self._began
        if len(self._points) > 1 and at_s - self._points[-1].at_s < OBSERVE_EVERY_S:
            return
        self._observe(at_s, batch_seconds=report.seconds, work_seconds=report.work_s)

    def _observe(self, at_s: float, *, batch_seconds: float, work_seconds: float) -> None:
        point = _Point(at_s, self._sum["messages"], self._lag())
        self._points.append(point)
        metadata = {
            "at_s": round(at_s, 1),
            "lag": point.lag,
            "batch_seconds": round(batch_seconds, 3),
            "work_seconds": round(work_seconds, 3),
            **{name: value for name, value in self._sum.items() if value},
        }
        self._context.log_event(dg.AssetObservation(self._key, metadata=metadata))

    def _lag(self) -> int:
        facts = self._client.due()["groups"].get(self._spec.group, {"topics": {}})
        reads = facts["topics"].get(self._spec.topic) or {}
        return sum(int(reads.get(name) or 0) for name in ("unread", "unsettled", "parked"))

    def metadata(self, report: WindowReport) -> dict[str, Any]:
        """What the window did, for its materialization: totals, rate, and a picture."""
        found: dict[str, Any] = {
            "ended": report.ended,
            "epoch": report.epoch,
            "seconds": round(report.seconds, 1),
            "batches": report.batches,
            **{name: getattr(report, name) for name in _TOTALS},
            "dagster/row_count": report.rows,
            "published": dict(report.published),
        }
        if report.lost or report.swept_files:
            found |= {"deliveries_lost": report.lost, "swept_files": report.swept_files}
        if report.messages:
            self._points.append(
                _Point(time.monotonic() - self._began, report.messages, self._lag())
            )
            found["messages_per_second"] = round(report.messages / max(self._busy_s(), 1e-3), 1)
            found["chart"] = dg.MetadataValue.md(plot.markdown(self._panels()))
        return found

    def _busy_s(self) -> float:
        """From the window's beginning to its last observation; the idle end does not count."""
        return self._points[-2].at_s

    def _panels(self) -> list[plot.Series]:
        seconds = [point.at_s for point in self._points]
        rates = [0.0] + [
            (now.messages - then.messages) / max(now.at_s - then.at_s, 1e-3)
            for then, now in zip(self._points, self._points[1:], strict=False)
        ]
        lags = [float(point.lag) for point in self._points]
        return [
            plot.Series("messages per second", seconds, rates),
            plot.Series("messages not settled", seconds, lags, color="#d1532c"),
        ]
