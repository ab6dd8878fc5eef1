"""Dagster's view of a consumer: observations of a window, totals at its end, and the sink's hours.

``sink_hours/<group>`` is an external asset whose partitions are the hours of a consumer's sink. A
window's run has no partition, because it handles messages of any hour. At its end it reports the
hours whose files have changed since the last report, with their present row counts.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import dagster as dg

from rmq_pipeline.errors import RocketMQError
from rmq_pipeline.failure import signature_of
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.results import MessageFailure
from rmq_pipeline.orchestration import plot
from rmq_pipeline.orchestration.checks import waiting
from rmq_pipeline.orchestration.declarations import KIND, DeclaredTopic, identifier
from rmq_pipeline.orchestration.topic_log import log_partitions
from rmq_pipeline.spark.consumer import BatchReport, ConsumerSpec, WindowReport

#: Minimum interval between two observations.
OBSERVE_EVERY_S: Final = 2.0
#: A materialization lists at most this many hours of the sink, newest first.
HOURS: Final = 48
#: Maximum number of tracebacks logged, one per kind of failure.
LOGGED_MOST: Final = 50
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
#: One window reports about this many hours; each is an event in Dagster's storage.
HOURS_PER_WINDOW: Final = 500
#: Metadata key: the version of the sink that was reported.
VERSION: Final = "sink_version"
#: Format of a partition in sinks.
_HOUR: Final = "%Y-%m-%dT%H"


@dataclass(frozen=True)
class _Point:
    """State of a window at one moment."""

    at_s: float
    messages: int
    lag: int


class ConsumerWatch:
    """Reports one window to Dagster."""

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
        #: Signatures of failures whose traceback was logged.
        self._logged: set[str] = set()
        self._sum = dict.fromkeys((*_TOTALS, "batches"), 0)

    def batch(self, report: BatchReport) -> None:
        """Add a micro-batch; log an observation if OBSERVE_EVERY_S has passed."""
        self._log(report.failures)
        self._sum["batches"] += 1
        for name in _TOTALS:
            self._sum[name] += getattr(report, name)
        at_s = time.monotonic() - self._began
        if len(self._points) > 1 and at_s - self._points[-1].at_s < OBSERVE_EVERY_S:
            return
        self._observe(at_s, batch_seconds=report.seconds, work_seconds=report.work_s)

    def _log(self, failures: Sequence[MessageFailure]) -> None:
        """Log the traceback of each kind of failure once per run."""
        for failure in failures:
            signature = signature_of(failure.reason, error_type=failure.error_type)
            if signature not in self._logged and len(self._logged) < LOGGED_MOST:
                self._logged.add(signature)
                self._context.log.error(
                    "Message %s failed, the first of signature %s in this run.\n%s",
                    failure.message_id,
                    signature,
                    failure.traceback,
                )

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
        """Return the metadata of the window's materialization: totals, rate, and a chart."""
        found: dict[str, Any] = {
            "ended": report.ended,
            "epoch": report.epoch,
            "seconds": round(report.seconds, 1),
            "batches": report.batches,
            **{name: getattr(report, name) for name in _TOTALS},
            "published": dict(report.published),
            # Numbers, which the UI plots over the windows; it does not plot the dict above.
            "published_messages": sum(report.published.values()),
            "failures": report.retried + report.dead_lettered + report.parked,
            "messages_per_second": 0.0,
            **self._waiting(),
        }
        if self._spec.sink is not None:
            found |= self._of_sink()
        if report.lost or report.swept_files:
            found |= {"deliveries_lost": report.lost, "swept_files": report.swept_files}
        if report.messages:
            self._points.append(
                _Point(time.monotonic() - self._began, report.messages, self._lag())
            )
            found["messages_per_second"] = round(report.messages / max(self._busy_s(), 1e-3), 1)
            found["chart"] = dg.MetadataValue.md(plot.markdown(self._panels()))
        return found

    def _waiting(self) -> dict[str, float]:
        """Return what the window leaves: lag, age of the oldest message, and dead letters."""
        from rmq_pipeline.orchestration import queries

        try:
            found = waiting(self._client, self._spec.group)
            letters = queries.dead_letters_left(self._client, self._spec.group)
        except RocketMQError as error:
            # The messages are settled: a user without these rights has a shorter report.
            self._context.log.warning("The report has no lag: %s", error)
            return {}
        return {
            "lag": found["lag"],
            "oldest_waited_seconds": found["oldest_waited_seconds"],
            "dead_letters": letters,
        }

    def _of_sink(self) -> dict[str, Any]:
        """Return row count and newest hours of the whole sink; ``rows`` is of the window."""
        from rmq_pipeline.orchestration import queries

        total = queries.sink_rows(self._client, self._spec.group)
        hours = queries.sink_hours(self._client, self._spec.group, limit=HOURS)
        listed = [
            dg.TableRecord({name: hour[name] for name in ("partition", "rows", "files", "bytes")})
            for hour in hours
        ]
        found: dict[str, Any] = {"dagster/row_count": total}
        return found | ({"hours": dg.MetadataValue.table(listed)} if listed else {})

    def _busy_s(self) -> float:
        """Return the time from the window's start to its last observation, without the idle end."""
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


def hours_key(group: str) -> dg.AssetKey:
    """Return the key of the asset of a sink's hours."""
    return dg.AssetKey(["sink_hours", identifier(group)])


def hours_spec(spec: ConsumerSpec, *, topic: DeclaredTopic, consumer: dg.AssetKey) -> dg.AssetSpec:
    """Return the external asset of a sink's hours, on the grid of its topic's log."""
    return dg.AssetSpec(
        hours_key(spec.group),
        deps=[consumer],
        partitions_def=log_partitions(topic),
        description=f"Hours of the sink of {spec.group}, by {spec.partition_time}.",
        kinds={KIND, "parquet"},
        metadata={"consumer_group": spec.group, "partition_time": spec.partition_time},
    )


def report_sink_hours(
    context: dg.AssetExecutionContext, client: Client, *, group: str, topic: DeclaredTopic
) -> int:
    """Report the hours of a sink that have changed since the last report; return their number.

    Args:
        context: context of a window's run.
        client: client of the broker.
        group: the sink's consumer group.
        topic: defines the grid; hours outside it are omitted.
    """
    from rmq_pipeline.orchestration import queries

    key = hours_key(group)
    grid = log_partitions(topic)
    after = _reported(context.instance, key)
    found = queries.changed_sink_hours(client, group, after=after)
    placed = [(hour, _on_grid(hour["partition"], grid)) for hour in found]
    hours = [(hour, partition) for hour, partition in placed if partition is not None]
    for number, (hour, partition) in enumerate(hours):
        following = hours[number + 1][0]["newest"] if number + 1 < len(hours) else None
        is_last = following != hour["newest"]
        # A version counts as reported only after its last hour: the run may be killed between two
        # hours.
        metadata = _hour_metadata(hour, version=hour["newest"] if is_last else after)
        context.log_event(dg.AssetMaterialization(key, partition=partition, metadata=metadata))
        if is_last:
            after = hour["newest"]
            if number + 1 >= HOURS_PER_WINDOW:
                return number + 1
    return len(hours)


def _reported(instance: dg.DagsterInstance, key: dg.AssetKey) -> int:
    """Return the version of the sink up to which its hours were reported."""
    last = instance.get_latest_materialization_event(key)
    found = None if last is None else last.asset_materialization
    if found is None or VERSION not in found.metadata:
        return 0
    return int(str(found.metadata[VERSION].value))


def _on_grid(hour: str, grid: dg.HourlyPartitionsDefinition) -> str | None:
    try:
        at = datetime.strptime(hour, _HOUR).replace(tzinfo=UTC)
    except ValueError:  # beyond the year 9999, such as µs read as ms
        return None
    first, last = grid.get_first_partition_window(), grid.get_last_partition_window()
    if first is None or last is None or not first.start <= at < last.end:
        return None
    return at.strftime(grid.fmt)


def _hour_metadata(hour: dict[str, Any], *, version: int) -> dict[str, Any]:
    return {
        "rows": hour["rows"],
        "dagster/partition_row_count": hour["rows"],
        "files": hour["files"],
        "bytes": hour["bytes"],
        VERSION: version,
    }
