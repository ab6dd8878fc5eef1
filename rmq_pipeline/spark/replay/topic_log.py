"""A topic as a Spark DataFrame: the segments of its manifest, and the unsealed messages.

Spark reads the segments itself. The driver reads unsealed messages from the broker, and writes them
to Parquet files with the same columns. ``Source`` has the messages that a group has settled.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa
from pyarrow import fs

from rmq_pipeline import checked_parquet, schema
from rmq_pipeline.errors import ArchiveError, RequestError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.lake.readers import read_in_tasks
from rmq_pipeline.storage.place import at
from rmq_pipeline.storage.root import HIDDEN, Address, below, is_uri, path_in, shown

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from sqlglot import exp

_DIALECT: Final = "duckdb"
#: Views of messages that were examined and are not settled.
_UNSETTLED: Final = ("in_flight", "retrying", "parked", "waiting")
#: Place of a message.
PLACE: Final = pa.schema([("queue_id", pa.int32()), ("queue_offset", pa.int64())])

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


@dataclass(frozen=True, slots=True)
class Settled:
    """A topic's messages that a group has settled: those before the cursor and not in ``open``."""

    #: queue_id -> the first offset that was not examined.
    cursors: dict[int, int]
    #: PLACE of unsettled messages before the cursor.
    open: pa.Table


def settled(client: Client, group: str, *, topic: str) -> Settled:
    """Return the messages of a topic that a group has settled."""
    from sqlglot import exp

    asked = exp.select("queue_id", '"cursor"').from_("progress").where(*_is_of(group, topic))
    cursors = {int(row["queue_id"]): int(row["cursor"]) for row in _rows_of_query(client, asked)}
    parts = [
        exp.select(*PLACE.names).from_(view).where(*_is_of(group, topic)) for view in _UNSETTLED
    ]
    left = client.sql(exp.union(*parts, distinct=True).sql(_DIALECT))
    return Settled(cursors, left.cast(PLACE))


def dead_lettered(client: Client, group: str, *, topic: str) -> pa.Table:
    """Return a group's dead letters of a topic that were not acked after a redrive.

    Returns:
        PLACE, reason, error_type.
    """
    from sqlglot import exp

    query = (
        exp.select(
            "d.origin_queue_id AS queue_id",
            "d.origin_queue_offset AS queue_offset",
            "d.reason",
            "d.error_type",
        )
        .from_("dead_letters AS d")
        .join(
            "redrives AS r",
            on=(
                "r.consumer_group = d.consumer_group AND r.dead_letter_queue_id = d.queue_id"
                " AND r.dead_letter_offset = d.queue_offset"
            ),
            join_type="left",
        )
        .where(*_is_of(group, topic, table="d"))
        .where("coalesce(r.outcome, '') <> 'acked'")
    )
    found = client.sql(query.sql(_DIALECT))
    types = [*PLACE, ("reason", pa.string()), ("error_type", pa.string())]
    return found.cast(pa.schema(types))


def span(
    client: Client, topic: str, *, column: str, from_ms: int, to_ms: int
) -> dict[int, tuple[int, int]]:
    """Return queue_id -> [base, end) of the messages whose time is in [from_ms, to_ms).

    Args:
        client: client of the broker.
        topic: name of the topic.
        column: stored_at_ms or born_at_ms.
        from_ms: start of the range, inclusive.
        to_ms: end of the range, exclusive.
    """
    from sqlglot import exp

    query = (
        exp.select("queue_id", "min(queue_offset) AS base", "max(queue_offset) + 1 AS end_")
        .from_("messages")
        .where(exp.column("topic").eq(topic), exp.column(column) >= from_ms)
        .where(exp.column(column) < to_ms)
        .group_by("queue_id")
    )
    return {
        int(r["queue_id"]): (int(r["base"]), int(r["end_"])) for r in _rows_of_query(client, query)
    }


def stored_at(client: Client, topic: str, *, places: list[tuple[int, int]]) -> list[int | None]:
    """Return stored_at_ms of messages at (queue_id, queue_offset); None for missing ones."""
    from sqlglot import exp

    if not places:
        return []
    either = exp.or_(
        *(
            exp.and_(exp.column("queue_id").eq(q), exp.column("queue_offset").eq(o))
            for q, o in places
        )
    )
    query = exp.select(*PLACE.names, "stored_at_ms").from_("messages")
    rows = _rows_of_query(client, query.where(exp.column("topic").eq(topic), either))
    known = {(r["queue_id"], r["queue_offset"]): int(r["stored_at_ms"]) for r in rows}
    return [known.get(place) for place in places]


def _is_of(group: str, topic: str, *, table: str | None = None) -> "list[exp.Expression]":
    from sqlglot import exp

    return [
        exp.column("consumer_group", table).eq(group),
        exp.column("topic", table).eq(topic),
    ]


def _rows_of_query(client: Client, query: "exp.Expression") -> list[dict[str, Any]]:
    return cast(list[dict[str, Any]], client.sql(query.sql(_DIALECT)).to_pylist())


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
        root = str(status["settings"].get("archive_root") or f"{status['home']}/topics")
        if HIDDEN in root:
            raise RequestError(
                f"The archive's address has credentials: {root}. The broker does not tell them.",
                remedy="Give them to the broker and to Spark by environment variables.",
            )
        self.root = str(
            below(root if is_uri(root) else Path(root), f"{topic}/{self.described['topic_id']}")
        )
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

    def tail(self, folder: Address, *, wanted: Range, whole: bool) -> list[Stored]:
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

    def _queue(self, folder: Address, queue_id: int, *, base: int, end: int) -> Stored:
        name = f"queue_id={queue_id}/tail.parquet"
        columns = pa.schema([f for f in schema.READ if f.name != "queue_id"])
        with (
            at(folder).create(name) as stream,
            checked_parquet.writer(stream, columns, compression="lz4") as file,
        ):
            for offset in range(base, end, _PAGE_ROWS):
                limit = min(_PAGE_ROWS, end - offset)
                page = self._client.read(self.topic, queue_id, offset=offset, limit=limit)
                file.write_table(page.select(columns.names).cast(columns))
        return Stored(str(below(folder, name)), queue_id, base, end)


def frame(
    spark: "SparkSession",
    log: TopicLog,
    *,
    segments: list[Segment],
    tail: list[Stored],
    folder: Address,
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
        path = path_in(log.root, segment.path)
        by_base.setdefault(path.partition("/queue_id=")[0], []).append(path)
    for base, paths in by_base.items():
        if is_uri(base):
            parts += _read_in_tasks(spark, paths)
            continue
        parts.append(reader.option("basePath", base).parquet(*paths))
    return reduce(lambda one, other: one.unionByName(other), parts) if parts else None


def _read_in_tasks(spark: "SparkSession", uris: list[str]) -> "list[DataFrame]":
    """Return a DataFrame of COLUMNS_DDL for each queue: Spark has no file systems for the URIs."""
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    names = [column.split()[0] for column in COLUMNS_DDL.split(", ")][:-1]
    columns = pa.schema([schema.READ.field(name) for name in names])
    queues: dict[int, list[str]] = {}
    for uri in uris:
        number = uri.partition("/queue_id=")[2].partition("/")[0]
        queues.setdefault(int(number), []).append(uri)
    return [
        read_in_tasks(spark, uris=some, columns=columns).withColumn("queue_id", F.lit(queue_id))
        for queue_id, some in queues.items()
    ]


def check_reachable(root: str) -> None:
    """Check that this process reaches the folder of a topic that has segments.

    Raises:
        ArchiveError: it has no manifest here.
    """
    if _manifest_of(root) is None:
        raise ArchiveError(
            f"{shown(root)} has no {_MANIFEST} on this machine, though the broker had segments"
            " there when the replay began.",
            remedy="Let Spark's tasks reach the broker's archive: a shared folder, or an object"
            " store (`archive_root`).",
        )


def _manifest_of(root: str) -> dict[str, Any] | None:
    files, path = fs.FileSystem.from_uri(root)
    try:
        with files.open_input_stream(f"{path}/{_MANIFEST}") as stream:
            found: dict[str, Any] = json.loads(stream.read())
    except FileNotFoundError:
        return None
    return found


def listed(root: str) -> list[Segment]:
    """Return the segments in the manifest of a topic; none without a manifest.

    Args:
        root: folder of the topic.

    Raises:
        ValueError: a newer version wrote the manifest.
    """
    listed = _manifest_of(root)
    if listed is None:
        return []
    if listed["format"] > _MANIFEST_FORMAT:
        raise ValueError(f"{shown(path_in(root, _MANIFEST))} was written by a newer version.")
    return [
        Segment(entry["path"], entry["queue_id"], entry["base"], entry["end"], entry)
        for entry in listed["files"]
    ]


@dataclass(frozen=True, slots=True)
class Source:
    """Segments, and the files of unsealed messages."""

    spark: "SparkSession"
    log: TopicLog
    #: The files, and their folder.
    tail: list[Stored]
    folder: Address
    settled: Settled

    def files(self, keep: Callable[[Segment], bool]) -> list[Stored]:
        """Return the files of the selected segments, and the tail."""
        kept = (segment for segment in self.log.segments if keep(segment))
        paths = (
            Stored(path_in(self.log.root, each.path), each.queue_id, each.base, each.end)
            for each in kept
        )
        return [*paths, *self.tail]

    def of(self, keep: Callable[[Segment], bool]) -> "DataFrame | None":
        """Return settled messages of segments and the tail, not yet read; None if there are none.

        Args:
            keep: selects the segments.
        """
        segments = [segment for segment in self.log.segments if keep(segment)]
        messages = frame(
            self.spark, self.log, segments=segments, tail=self.tail, folder=self.folder
        )
        return None if messages is None else self._settled(messages)

    def _settled(self, messages: "DataFrame") -> "DataFrame":
        from pyspark.sql import functions as F  # noqa: N812 - its usual name

        queue, offset = F.col("queue_id"), F.col("queue_offset")
        bounds = (
            (queue == queue_id) & (offset < cursor)
            for queue_id, cursor in self.settled.cursors.items()
        )
        chosen = messages.filter(reduce(lambda one, other: one | other, bounds, F.lit(False)))
        if not self.settled.open.num_rows:
            return chosen
        left = F.broadcast(self.spark.createDataFrame(self.settled.open))
        return chosen.join(left, PLACE.names, "left_anti")
