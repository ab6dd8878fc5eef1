"""A topic as a Spark DataFrame: the segments of its manifest, and the unsealed messages.

Spark reads the segments itself. The driver reads unsealed messages from the broker, and writes them
to Parquet files with the same columns.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyarrow import fs

from rmq_pipeline import checked_parquet, schema
from rmq_pipeline.flight.client import Client
from rmq_pipeline.spark.replay.settled import span

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

#: Columns read of a message.
COLUMNS_DDL: Final = (
    "queue_offset bigint, message_id string, tag string, keys array<string>,"
    " message_group string, properties map<string,string>, body binary,"
    " born_at_ms bigint, stored_at_ms bigint, deliver_at_ms bigint, queue_id int"
)
_MANIFEST: Final = "_manifest.json"
_MANIFEST_FORMAT: Final = 2
_PAGE_ROWS: Final = 10_000
_TIMES: Final = {"stored": "stored_at_ms", "born": "born_at_ms"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The messages of a topic whose partition time is in [from_ms, to_ms)."""

    topic: str
    from_ms: int
    to_ms: int
    #: stored, born, or the property that holds ms since 1970.
    partition_time: str

    @property
    def column(self) -> str | None:
        """The column with the partition time; None if it is a property."""
        return _TIMES.get(self.partition_time)

    def overlaps(self, low_ms: int, high_ms: int) -> bool:
        """Return True if [low_ms, high_ms], both inclusive, overlaps the range."""
        return high_ms >= self.from_ms and low_ms < self.to_ms

    def time(self) -> "Column":
        """Return the partition time of a message; null if it has none."""
        from pyspark.sql import functions as F  # noqa: N812 - its usual name

        if self.column is not None:
            return F.col(self.column)
        return F.col("properties").getItem(self.partition_time).try_cast("bigint")

    def holds(self) -> "Column":
        """Return a condition that a message is in the range."""
        time = self.time()
        return (time >= self.from_ms) & (time < self.to_ms)


@dataclass(frozen=True, slots=True)
class Stored:
    """Messages [base, end) of a queue, in one Parquet file."""

    path: str
    queue_id: int
    base: int
    end: int

    @property
    def rows(self) -> int:
        """Number of messages."""
        return self.end - self.base


@dataclass(frozen=True, slots=True)
class Segment:
    """A file of the topic's manifest."""

    path: str
    queue_id: int
    base: int
    end: int
    facts: Mapping[str, Any]

    def may_hold(self, wanted: Range) -> bool:
        """Return True if the segment may contain messages of a range, judging by its times."""
        low = self.facts.get(f"min_{wanted.column}")
        high = self.facts.get(f"max_{wanted.column}")
        if low is None or high is None:
            return True
        return wanted.overlaps(low, high)


class TopicLog:
    """Contents of a topic when this object was created."""

    def __init__(self, client: Client, topic: str) -> None:
        self._client = client
        self.described = client.describe_topic(topic)
        status = client.status()
        root = status["settings"].get("archive_root") or f"{status['home']}/topics"
        self.root = f"{root}/{topic}/{self.described['topic_id']}"
        self.segments = listed(self.root)
        self.ends = {queue["queue_id"]: queue["max_offset"] for queue in self.described["offsets"]}

    @property
    def topic(self) -> str:
        """Name of the topic."""
        return str(self.described["name"])

    def one_queue_a_group(self, files: list[Stored]) -> bool:
        """Return True if no message group has changed its queue between these messages."""
        growths = self.described["growths"]
        # The number of times that the topic had grown when they were stored.
        eras = {
            sum(each.queue_id >= len(ends) or offset >= ends[each.queue_id] for ends in growths)
            for each in files
            for offset in (each.base, each.end - 1)
        }
        return len(eras) <= 1

    def tail_begins(self) -> dict[int, int]:
        """Return queue_id -> the first offset that is in no segment."""
        begins = {q["queue_id"]: int(q["min_offset"]) for q in self.described["offsets"]}
        for segment in self.segments:
            begins[segment.queue_id] = max(begins.get(segment.queue_id, 0), segment.end)
        return begins

    def tail(self, folder: Path, *, wanted: Range, whole: bool) -> list[Stored]:
        """Write unsealed messages to files, one folder per queue.

        Args:
            folder: target folder, which Spark must reach.
            wanted: the range of messages to write.
            whole: write all unsealed messages, not only the range.
        """
        begins = self.tail_begins()
        spans = {queue: (begin, self.ends[queue]) for queue, begin in begins.items()}
        if not whole and wanted.column is not None:
            found = span(
                self._client,
                self.topic,
                column=wanted.column,
                from_ms=wanted.from_ms,
                to_ms=wanted.to_ms,
            )
            spans = {
                queue: (max(begins[queue], base), end)
                for queue, (base, end) in found.items()
                if queue in begins
            }
        return [
            self._queue(folder, queue, base=base, end=end)
            for queue, (base, end) in spans.items()
            if base < end
        ]

    def _queue(self, folder: Path, queue_id: int, *, base: int, end: int) -> Stored:
        path = folder / f"queue_id={queue_id}" / "tail.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = pa.schema([f for f in schema.READ if f.name != "queue_id"])
        with checked_parquet.writer(path, columns, compression="lz4") as file:
            for offset in range(base, end, _PAGE_ROWS):
                limit = min(_PAGE_ROWS, end - offset)
                page = self._client.read(self.topic, queue_id, offset=offset, limit=limit)
                file.write_table(page.select(columns.names).cast(columns))
        return Stored(str(path), queue_id, base, end)


def frame(
    spark: "SparkSession",
    log: TopicLog,
    *,
    segments: list[Segment],
    tail: list[Stored],
    folder: Path,
) -> "DataFrame | None":
    """Return segments and tail as one DataFrame of COLUMNS_DDL; None if there is nothing to read.

    Args:
        spark: the session.
        log: log of the topic.
        segments: the segments to read.
        tail: result of ``TopicLog.tail``.
        folder: folder of the tail.
    """
    reader = spark.read.schema(COLUMNS_DDL)
    parts = []
    by_base = {str(folder): [each.path for each in tail]} if tail else {}
    for segment in segments:
        # Below this base path, queue_id= becomes a column.
        base = f"{log.root}/{segment.path}".partition("/queue_id=")[0]
        by_base.setdefault(base, []).append(f"{log.root}/{segment.path}")
    for base, paths in by_base.items():
        parts.append(reader.option("basePath", base).parquet(*paths))
    return reduce(lambda one, other: one.unionByName(other), parts) if parts else None


def listed(root: str) -> list[Segment]:
    """Return the segments in the manifest of a topic; none without a manifest.

    Args:
        root: folder of the topic.

    Raises:
        ValueError: a newer version wrote the manifest.
    """
    files, path = fs.FileSystem.from_uri(root)
    try:
        with files.open_input_stream(f"{path}/{_MANIFEST}") as stream:
            listed = json.loads(stream.read())
    except FileNotFoundError:
        return []
    if listed["format"] > _MANIFEST_FORMAT:
        raise ValueError(f"{root}/{_MANIFEST} was written by a newer version.")
    return [
        Segment(entry["path"], entry["queue_id"], entry["base"], entry["end"], entry)
        for entry in listed["files"]
    ]
