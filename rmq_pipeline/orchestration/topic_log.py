"""``topic_log``: sealed messages of a topic by hour, as partitions of an external asset.

Replays are launched on this grid. An hour with data is a materialized partition with its rows and
bytes. A sensor reports the hours in new segments; it reads one column of them.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from rmq_pipeline.archive.segment_file import open_segment
from rmq_pipeline.errors import BusyError, TopicNotFoundError
from rmq_pipeline.orchestration.declarations import KIND, DeclaredTopic, identifier
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.spark.replay.sinks import HOUR_MS
from rmq_pipeline.spark.replay.topic_log import Range, Segment, TopicLog
from rmq_pipeline.storage.root import path_in

INTERVAL_S: Final = 15
#: One tick reports at most this many hours; each is an event in Dagster's storage.
HOURS_PER_TICK: Final = 200
_TIMES: Final = {"stored": "stored_at_ms", "born": "born_at_ms"}


@dataclass
class Reported:
    """Progress of the sensor on a topic."""

    topic_id: int = -1
    #: queue_id, as text -> the first offset that was not examined.
    done: dict[str, int] = field(default_factory=dict)
    #: Hours since 1970 that must still be reported.
    pending: list[int] = field(default_factory=list)

    def take(self, segments: Iterable[Segment], log: TopicLog, *, partition_time: str) -> None:
        """Add the hours of segments that were not yet examined."""
        for segment in segments:
            queue = str(segment.queue_id)
            if segment.end > self.done.get(queue, 0):
                hours = hours_of(log, segment, partition_time=partition_time)
                self.pending = sorted({*self.pending, *hours})
                self.done[queue] = segment.end


def log_key(topic: DeclaredTopic) -> dg.AssetKey:
    """Return the key of the asset of a topic's log."""
    return dg.AssetKey(["topic_log", identifier(topic.name)])


def log_partitions(topic: DeclaredTopic) -> dg.HourlyPartitionsDefinition:
    """Return the hours of a topic's partition time."""
    # Include the present hour: its sealed messages can already be replayed.
    offset = 1 if topic.log_until is None else 0
    return dg.HourlyPartitionsDefinition(
        start_date=topic.log_from, end_date=topic.log_until, timezone="UTC", end_offset=offset
    )


def log_spec(topic: DeclaredTopic) -> dg.AssetSpec:
    """Return the external asset of a topic's log."""
    return dg.AssetSpec(
        log_key(topic),
        deps=[topic.key],
        partitions_def=log_partitions(topic),
        description=f"Sealed messages of {topic.name}, by the hour {_words(topic)}.",
        kinds={KIND, "parquet"},
        tags=topic.tags,
        metadata={"topic": topic.name}
        | ({"partition_time": topic.partition_time} if topic.partition_time else {}),
    )


def _words(topic: DeclaredTopic) -> str:
    if topic.partition_time is None:
        return "of the topic's partition_time"
    known = topic.partition_time in _TIMES
    if known:
        return f"it was {topic.partition_time}"
    return f"it was given by the property {topic.partition_time}"


def topic_log_sensor(topics: Sequence[DeclaredTopic], *, name: str) -> dg.SensorDefinition:
    """Return the sensor that fills the grids of these topics.

    Args:
        topics: declared topics.
        name: name of the sensor.
    """

    @dg.sensor(
        name=name,
        asset_selection=dg.AssetSelection.assets(*(log_key(topic) for topic in topics)),
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=INTERVAL_S,
        description="Reports which hours of the topics are sealed, with their rows and bytes.",
    )
    def topic_log(context: dg.SensorEvaluationContext, broker: BrokerResource) -> dg.SensorResult:
        said = {k: Reported(**v) for k, v in json.loads(context.cursor or "{}").items()}
        events: list[dg.AssetMaterialization] = []
        try:
            with broker.client(retry_s=0.0) as client:
                for topic in topics:
                    try:
                        log = TopicLog(client, topic.name)
                    except TopicNotFoundError:
                        continue
                    reported = said.setdefault(topic.name, Reported())
                    events += _report(
                        topic, log, reported=reported, limit=HOURS_PER_TICK - len(events)
                    )
        except BusyError as error:
            return dg.SensorResult(skip_reason=str(error))
        cursor = json.dumps({name: asdict(each) for name, each in said.items()})
        if not events:
            return dg.SensorResult(skip_reason="Nothing new is sealed.", cursor=cursor)
        return dg.SensorResult(asset_events=events, cursor=cursor)

    return topic_log


def _partition_time(topic: DeclaredTopic, log: TopicLog) -> str:
    """Return the declared partition time, else the topic's own."""
    return topic.partition_time or str(log.described["partition_time"])


def _report(
    topic: DeclaredTopic, log: TopicLog, *, reported: Reported, limit: int
) -> list[dg.AssetMaterialization]:
    topic_id = int(log.described["topic_id"])
    if reported.topic_id != topic_id:
        reported.topic_id, reported.done, reported.pending = topic_id, {}, []
    reported.take(log.segments, log, partition_time=_partition_time(topic, log))
    grid = log_partitions(topic)
    first, last = grid.get_first_partition_window(), grid.get_last_partition_window()
    wanted, reported.pending = reported.pending[:limit], reported.pending[limit:]
    on_grid = [
        hour
        for hour in wanted
        if first is not None and last is not None and first.start <= _moment(hour) < last.end
    ]
    if not on_grid:
        return []
    rows, sizes = _totals(topic, log, hours=on_grid)
    return [
        dg.AssetMaterialization(
            log_key(topic),
            partition=_moment(hour).strftime(grid.fmt),
            metadata={
                "rows": rows[hour],
                "dagster/partition_row_count": rows[hour],
                "bytes": round(sizes[hour]),
            },
        )
        for hour in on_grid
        if rows[hour]
    ]


def _totals(
    topic: DeclaredTopic, log: TopicLog, *, hours: Sequence[int]
) -> tuple[Counter[int], Counter[float]]:
    """Return rows and bytes of each hour; a segment's bytes are distributed by rows."""
    wanted = Range(
        topic=topic.name,
        from_ms=hours[0] * HOUR_MS,
        to_ms=(hours[-1] + 1) * HOUR_MS,
        partition_time=_partition_time(topic, log),
    )
    rows: Counter[int] = Counter()
    sizes: Counter[float] = Counter()
    for segment in log.segments:
        if segment.may_hold(wanted):
            row_bytes = segment.facts["bytes"] / max(1, segment.end - segment.base)
            found = hours_of(log, segment, partition_time=wanted.partition_time)
            rows.update(found)
            sizes.update({hour: n * row_bytes for hour, n in found.items()})
    return rows, sizes


def hours_of(log: TopicLog, segment: Segment, *, partition_time: str) -> Counter[int]:
    """Count a segment's messages by hour since 1970; those without a time are omitted.

    Args:
        log: log of the topic.
        segment: segment of that log.
        partition_time: stored, born, or a property.
    """
    column = _TIMES.get(partition_time)
    files, path = fs.FileSystem.from_uri(path_in(log.root, segment.path))
    with files.open_input_file(path) as source:
        table = open_segment(source).read(columns=[column or "properties"])
    if column is not None:
        times = table[column]
    else:
        texts = pc.map_lookup(table["properties"], pa.scalar(partition_time), "first")
        digits = pc.fill_null(pc.match_substring_regex(texts, r"^\d{1,18}$"), False)
        times = texts.filter(digits).cast(pa.int64())
    hours = pc.divide(pc.drop_null(times), HOUR_MS)
    counted = pc.value_counts(hours.combine_chunks())
    values, counts = counted.field("values"), counted.field("counts")
    return Counter(dict(zip(values.to_pylist(), counts.to_pylist(), strict=True)))


def _moment(hour: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(hours=hour)
