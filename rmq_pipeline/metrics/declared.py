"""The metrics that the broker has: name, type, unit, labels; and the table of their samples.

Where RocketMQ 5 has a metric of the same meaning, the name, the labels and the unit are RocketMQ's,
as its Prometheus exporter shows them. Names that begin with rmq_ are ours. Counters and histograms
begin at 0 when the broker starts; ``rate`` and ``increase`` of Prometheus allow for that.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Final, Literal

import pyarrow as pa

Type = Literal["counter", "gauge", "histogram"]

#: Result of the verb ``metrics``. ``part`` is empty, or the part of a histogram: bucket (with the
#: label le; counts include those of smaller buckets), sum or count.
SAMPLES: Final = pa.schema(
    [
        ("name", pa.string()),
        ("type", pa.string()),
        ("part", pa.string()),
        ("labels", pa.map_(pa.string(), pa.string())),
        ("value", pa.float64()),
        ("unit", pa.string()),
        ("help", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Metric:
    """Declaration of a metric."""

    name: str
    type: Type
    unit: str
    labels: tuple[str, ...]
    help: str


_GROUP: Final = ("consumer_group", "topic", "is_system")

METRICS: Final = (
    Metric(
        "rocketmq_messages_in_total",
        "counter",
        "messages",
        ("topic", "message_type", "is_system"),
        "Messages that producers have sent. Scheduled ones count when they are sent, as"
        " message_type delay, half messages as transaction; repeated ones that were not stored do"
        " not count.",
    ),
    Metric(
        "rocketmq_messages_out_total",
        "counter",
        "messages",
        _GROUP,
        "Messages delivered to consumers, redeliveries and pulls included.",
    ),
    Metric(
        "rocketmq_throughput_in_total",
        "counter",
        "bytes",
        ("topic", "message_type", "is_system"),
        "Bytes of the bodies of rocketmq_messages_in_total.",
    ),
    Metric(
        "rocketmq_throughput_out_total",
        "counter",
        "bytes",
        _GROUP,
        "Bytes of the bodies of rocketmq_messages_out_total.",
    ),
    Metric(
        "rocketmq_consumer_lag_messages",
        "gauge",
        "messages",
        _GROUP,
        "Messages that the group has not settled: unread, in flight, retrying and parked.",
    ),
    Metric(
        "rocketmq_consumer_lag_latency_milliseconds",
        "gauge",
        "milliseconds",
        _GROUP,
        "Age of the oldest message that the group has not settled; 0 without one.",
    ),
    Metric(
        "rocketmq_consumer_inflight_messages",
        "gauge",
        "messages",
        _GROUP,
        "Messages delivered to consumers and not settled.",
    ),
    Metric(
        "rocketmq_consumer_ready_messages",
        "gauge",
        "messages",
        _GROUP,
        "Messages that are stored for the group and not delivered, and due redeliveries.",
    ),
    Metric(
        "rocketmq_consumer_queueing_latency_milliseconds",
        "gauge",
        "milliseconds",
        _GROUP,
        "Age of the oldest message behind the group's cursor that was never delivered; 0 without"
        " one.",
    ),
    Metric(
        "rocketmq_send_to_dlq_messages_total",
        "counter",
        "messages",
        _GROUP,
        "Messages copied to the group's dead letters.",
    ),
    Metric(
        "rocketmq_producer_connections",
        "gauge",
        "clients",
        ("language",),
        "Live RocketMQ clients that sent a producer's settings.",
    ),
    Metric(
        "rocketmq_consumer_connections",
        "gauge",
        "clients",
        ("consumer_group", "language", "consume_mode", "is_system"),
        "Live consumers by group: RocketMQ clients (push), and members at the Flight endpoint.",
    ),
    Metric(
        "rocketmq_half_messages",
        "gauge",
        "messages",
        (),
        "Half messages whose transactions have not ended.",
    ),
    Metric(
        "rocketmq_commit_messages_total",
        "counter",
        "messages",
        (),
        "Half messages that were committed.",
    ),
    Metric(
        "rocketmq_rollback_messages_total",
        "counter",
        "messages",
        (),
        "Half messages that were rolled back.",
    ),
    Metric(
        "rocketmq_storage_size_bytes",
        "gauge",
        "bytes",
        ("storage_type", "storage_medium"),
        "Used bytes of the disk that the home is on.",
    ),
    Metric(
        "rocketmq_storage_flush_behind_bytes",
        "gauge",
        "bytes",
        ("storage_type", "storage_medium"),
        "Written bytes of the commit log that are not synced; 0 with flush sync.",
    ),
    Metric(
        "rocketmq_storage_dispatch_behind_bytes",
        "gauge",
        "bytes",
        ("storage_type", "storage_medium"),
        "Synced bytes of the commit log that dispatch has not applied to DuckDB.",
    ),
    Metric("rocketmq_topic_number", "gauge", "topics", (), "Topics, system topics included."),
    Metric("rocketmq_consumer_group_number", "gauge", "groups", (), "Consumer groups."),
    Metric(
        "rmq_build_info",
        "gauge",
        "",
        ("version", "home", "upkeep", "flush"),
        "1; the labels tell the version, the home and its flags.",
    ),
    Metric(
        "rmq_start_time_seconds",
        "gauge",
        "seconds",
        (),
        "When the broker was opened, in seconds since 1970.",
    ),
    Metric("rmq_memory_bytes", "gauge", "bytes", (), "Resident memory of the broker's process."),
    Metric("rmq_log_bytes", "gauge", "bytes", (), "Bytes of the commit log that are kept."),
    Metric(
        "rmq_log_written_bytes_total",
        "counter",
        "bytes",
        (),
        "Bytes of the frames written to the commit log.",
    ),
    Metric(
        "rmq_frame_write_seconds",
        "histogram",
        "seconds",
        (),
        "Time to write a frame to the commit log; with flush sync, to sync it too.",
    ),
    Metric("rmq_database_bytes", "gauge", "bytes", (), "Bytes of DuckDB's files."),
    Metric(
        "rmq_disk_free_bytes",
        "gauge",
        "bytes",
        (),
        "Bytes that the broker may still write to the home's disk.",
    ),
    Metric("rmq_disk_bytes", "gauge", "bytes", (), "Size of the home's disk."),
    Metric(
        "rmq_clock_ahead_milliseconds",
        "gauge",
        "milliseconds",
        (),
        "Lead of the broker's time over the machine's; negative: behind.",
    ),
    Metric(
        "rmq_messages",
        "gauge",
        "messages",
        ("topic", "is_system"),
        "Messages of the topic that are kept, in the log and the archive.",
    ),
    Metric(
        "rmq_deliveries_ended_total",
        "counter",
        "messages",
        (*_GROUP, "outcome"),
        "Deliveries by their end: ack, retry (the consumer reported a failure), expire (the lease"
        " ended), release (the attempt does not count), park, dead_letter.",
    ),
    Metric(
        "rmq_retrying_messages",
        "gauge",
        "messages",
        _GROUP,
        "Messages that wait for another delivery after a failure or a release.",
    ),
    Metric(
        "rmq_parked_messages",
        "gauge",
        "messages",
        _GROUP,
        "Messages parked after their last attempt, and those held behind one.",
    ),
    Metric(
        "rmq_quarantined_message_groups",
        "gauge",
        "message groups",
        _GROUP,
        "Message groups whose messages are dead-lettered without a delivery.",
    ),
    Metric(
        "rmq_dead_letters_open",
        "gauge",
        "messages",
        ("consumer_group",),
        "Dead letters of the group that are kept and that no redrive has returned.",
    ),
    Metric(
        "rmq_scheduled_messages",
        "gauge",
        "messages",
        (),
        "Messages that wait for their delivery time.",
    ),
    Metric(
        "rmq_scheduled_overdue_milliseconds",
        "gauge",
        "milliseconds",
        (),
        "Time for which the first scheduled message has been due; 0 if no message is due.",
    ),
    Metric(
        "rmq_scheduled_delivered_total",
        "counter",
        "messages",
        (),
        "Scheduled messages that were delivered to their topics.",
    ),
    Metric(
        "rmq_upkeep_fallbacks_total",
        "counter",
        "jobs",
        ("upkeep_job",),
        "Upkeep jobs that the broker did itself because no run of Dagster did them in time.",
    ),
    Metric(
        "rmq_calls_total",
        "counter",
        "calls",
        ("protocol", "verb", "outcome"),
        "Calls at the endpoints (protocol flight, grpc) by outcome: ok, or the class of the error.",
    ),
    Metric(
        "rmq_call_seconds",
        "histogram",
        "seconds",
        ("protocol", "verb"),
        "Time from a call's command to its answer; of a receive with the wait for messages.",
    ),
)
BY_NAME: Final = MappingProxyType({metric.name: metric for metric in METRICS})

#: Upper bounds of the buckets of both histograms, in seconds.
BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)


class Histogram:
    """Counts of durations by BOUNDS_S. Not safe for several writing threads."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def copy(self) -> "Histogram":
        """Return a copy, for a reader that holds no lock."""
        copied = Histogram()
        copied.counts, copied.total_s = list(self.counts), self.total_s
        return copied


class Samples:
    """Samples that become one table of SAMPLES."""

    def __init__(self) -> None:
        self._metrics: list[Metric] = []
        self._parts: list[str] = []
        self._values: list[float] = []
        self._offsets = [0]
        self._keys: list[str] = []
        self._texts: list[str] = []

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add a sample of a declared metric; ``labels`` are the values in the declared order."""
        self._add(BY_NAME[name], value, labels=labels)

    def add_histogram(self, name: str, histogram: Histogram, *labels: str) -> None:
        """Add the buckets, the sum and the count of a histogram."""
        metric = BY_NAME[name]
        bounds = [*map(repr, BOUNDS_S), "+Inf"]
        cumulative = list(accumulate(histogram.counts))
        for bound, count in zip(bounds, cumulative, strict=True):
            self._add(metric, count, labels=labels, part="bucket", le=bound)
        self._add(metric, histogram.total_s, labels=labels, part="sum")
        self._add(metric, cumulative[-1], labels=labels, part="count")

    def _add(
        self,
        metric: Metric,
        value: float,
        *,
        labels: Sequence[str],
        part: str = "",
        le: str | None = None,
    ) -> None:
        assert len(labels) == len(metric.labels), (metric.name, labels)
        self._metrics.append(metric)
        self._parts.append(part)
        self._values.append(value)
        self._keys.extend(metric.labels)
        self._texts.extend(labels)
        if le is not None:
            self._keys.append("le")
            self._texts.append(le)
        self._offsets.append(len(self._keys))

    def to_table(self) -> pa.Table:
        """Return the samples, those of a metric together, in the order of METRICS."""
        labels = pa.MapArray.from_arrays(
            pa.array(self._offsets, pa.int32()),
            pa.array(self._keys, pa.string()),
            pa.array(self._texts, pa.string()),
        )
        columns = [
            pa.array([metric.name for metric in self._metrics], pa.string()),
            pa.array([metric.type for metric in self._metrics], pa.string()),
            pa.array(self._parts, pa.string()),
            labels,
            pa.array(self._values, pa.float64()),
            pa.array([metric.unit for metric in self._metrics], pa.string()),
            pa.array([metric.help for metric in self._metrics], pa.string()),
        ]
        table = pa.Table.from_arrays(columns, schema=SAMPLES)
        place = {metric.name: at for at, metric in enumerate(METRICS)}
        rank = [place[metric.name] for metric in self._metrics]
        return table.take(pa.array(sorted(range(len(rank)), key=rank.__getitem__), pa.int64()))
