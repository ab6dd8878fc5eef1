"""Batch and streaming reads of topics: plan, tasks, and their messages.

A task reads an offset range of a queue from segment files and from the broker. With a group, the
broker shows the progress of a streaming query.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType
from typing_extensions import override

from rmq_pipeline import limits
from rmq_pipeline.archive import key_index
from rmq_pipeline.archive.segment import HIDDEN, INDEX
from rmq_pipeline.archive.segment_file import open_segment
from rmq_pipeline.errors import BrokerUnavailableError, IllegalOffsetError, RequestError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.spark.replay.topic_log import Segment, TopicLog
from rmq_pipeline.spark.source import filters, offsets
from rmq_pipeline.spark.source.filters import CONSTANT_COLUMNS, Pushed
from rmq_pipeline.spark.source.offsets import Offsets, TopicBounds
from rmq_pipeline.spark.source.options import Address, ReadOptions
from rmq_pipeline.storage.root import is_uri, path_in

#: Rows of the first page, as the size of bodies is unknown; later pages have about _PAGE_BYTES.
_FIRST_ROWS: Final = 64
_PAGE_ROWS: Final = 20_000
_PAGE_BYTES: Final = 16 << 20
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Offsets [start, end) in one segment file or, without a file, at the broker."""

    start: int
    end: int
    #: A path or a URI.
    file: str | None = None
    #: The offset of the file's first row.
    base: int = 0


@dataclass(frozen=True)
class QueuePartition(InputPartition):
    """Messages of one queue for one task; pieces in offset order."""

    address: Address
    topic: str
    topic_id: int
    queue_id: int
    pieces: tuple[FilePiece, ...]
    #: True: expired messages raise an error; False: they are skipped.
    fail_on_data_loss: bool
    #: Conditions that the messages must meet.
    pushed: Pushed = field(default_factory=Pushed)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the messages by offset, in several tables with these columns in this order.

        Raises:
            IllegalOffsetError: messages have expired since planning, and fail_on_data_loss is set.
        """
        stored = [name for name in columns if name not in CONSTANT_COLUMNS]
        place = {"topic": self.topic, "queue_id": self.queue_id}
        with self.address.connect() as client:
            for piece in self.pieces:
                for found in self._read(client, piece, columns=stored):
                    table = self.pushed.rows(found)
                    constants = {
                        name: pa.repeat(pa.scalar(value), table.num_rows)
                        for name, value in place.items()
                    }
                    arrays = [
                        constants[name] if name in constants else table.column(name)
                        for name in columns
                    ]
                    yield pa.table(arrays, names=list(columns))

    def _read(self, client: Client, piece: FilePiece, *, columns: list[str]) -> Iterator[pa.Table]:
        file = None if piece.file is None else open_if_present(piece.file)
        if file is None:
            # The segment was replaced and deleted, or is on another machine; the broker can read
            # it.
            yield from self._pages(client, piece, columns=columns)
            return
        with file:
            yield from rows_of_piece(file, piece, columns=columns, pushed=self.pushed)

    def _pages(self, client: Client, piece: FilePiece, *, columns: list[str]) -> Iterator[pa.Table]:
        if client.describe_topic(self.topic)["topic_id"] != self.topic_id:
            raise IllegalOffsetError(f"Topic {self.topic} was deleted and created again.")
        at, limit = piece.start, _FIRST_ROWS
        filter_ = filters.tag_filter(self.pushed)
        while at < piece.end:
            asked = min(limit, piece.end - at)
            try:
                page = client.read(
                    self.topic, self.queue_id, offset=at, limit=asked, filter=filter_
                )
            except IllegalOffsetError:
                at = self._skipped(client, at)
                continue
            if not page.num_rows and filter_ == "*":
                raise IllegalOffsetError(
                    f"Queue {self.queue_id} of topic {self.topic} ends at {at}, not {piece.end}."
                )
            yield page.select(columns)
            # A page has fewer messages than offsets if the broker filters.
            read = asked if page.num_rows == 0 or filter_ != "*" else page.num_rows
            at += read
            fitting = _PAGE_BYTES * read // max(1, page.nbytes)
            limit = max(1, min(_PAGE_ROWS, fitting, 8 * limit))

    def _skipped(self, client: Client, at: int) -> int:
        """Return the first retained offset; the messages before it have just expired."""
        queue = client.describe_topic(self.topic)["offsets"][self.queue_id]
        low = int(queue["min_offset"])
        if self.fail_on_data_loss or low <= at:
            why = "has expired" if at < low else "is not there"
            raise IllegalOffsetError(
                f"Offset {at} of queue {self.queue_id} of topic {self.topic} {why}; the queue"
                f" retains offsets {low} to {queue['max_offset']}."
            )
        return low


def open_if_present(path: str) -> pq.ParquetFile | None:
    """Open a segment; return None if it does not exist."""
    files, inside = fs.FileSystem.from_uri(path)
    try:
        return open_segment(files.open_input_file(inside))
    except FileNotFoundError:
        return None


def rows_of_piece(
    file: pq.ParquetFile, piece: FilePiece, *, columns: Sequence[str], pushed: Pushed | None = None
) -> Iterator[pa.Table]:
    """Yield the messages of a piece by row group; reads only the row groups that it overlaps.

    Row groups without a match are not read as far as the statistics and the key index tell. Other
    columns than those of the filters are read only if a row matches.
    """
    footer = file.metadata
    pushed = pushed or Pushed()
    counts = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    starts = piece.base + np.cumsum([0, *counts])
    chosen = [
        group
        for group in pushed.row_groups(footer)
        if starts[group] < piece.end and starts[group + 1] > piece.start
    ]
    if chosen and (pushed.keys or pushed.message_ids is not None):
        indexed = _indexed_row_groups(piece, pushed)
        chosen = [group for group in chosen if indexed is None or group in indexed]
    compared = [name for name in columns if name in pushed.columns]
    for group in chosen:
        low, high = max(int(starts[group]), piece.start), min(int(starts[group + 1]), piece.end)
        first = low - int(starts[group])
        if compared:
            table = file.read_row_group(group, columns=compared, use_threads=False)
            if not pushed.rows(table.slice(first, high - low)).num_rows:
                continue
        table = file.read_row_group(group, columns=list(columns), use_threads=False)
        yield table.slice(first, high - low)


def _indexed_row_groups(piece: FilePiece, pushed: Pushed) -> set[int] | None:
    """Return the row groups that may have the keys and ids of the filters; None: any."""
    if piece.file is None:
        return None
    place, asked, options = (
        piece.file.partition("?") if is_uri(piece.file) else (piece.file, "", "")
    )
    folder, _, name = place.rpartition("/")
    above, _, queue = folder.rpartition("/")
    if not above.endswith(f"/{HIDDEN}"):
        above = f"{above}/{HIDDEN}"
    index_path = f"{above}/{queue}/{name.rpartition('.')[0]}{INDEX}"
    files, inside = fs.FileSystem.from_uri(f"{index_path}{asked}{options}")
    try:
        with files.open_input_file(inside) as file:
            index = key_index.OneIndex(file.read_buffer())
    except (OSError, ValueError, KeyError, pa.ArrowException):
        return None  # missing or damaged: a read may do without it
    return pushed.indexed(index)


@dataclass(frozen=True, slots=True)
class Span:
    """Offsets [start, end) of a queue."""

    topic: str
    queue_id: int
    start: int
    end: int

    @property
    def rows(self) -> int:
        """Number of messages; negative if the end precedes the start."""
        return self.end - self.start

    def parts(self, n: int) -> Iterator["Span"]:
        """Split into ``n`` spans of similar size, or into single messages if there are fewer."""
        n = min(n, self.rows)
        for i in range(n):
            low, high = (self.start + self.rows * k // n for k in (i, i + 1))
            yield Span(self.topic, self.queue_id, low, high)


def plan_partitions(
    client: Client, spans: Iterable[Span], *, options: ReadOptions, pushed: Pushed | None = None
) -> list[QueuePartition]:
    """Return the tasks of a read: one per queue, or more if the options ask for more."""
    found = []
    logs: dict[str, TopicLog] = {}
    pushed = pushed or Pushed()
    for span in cut([span for span in spans if span.rows > 0], options=options):
        if span.topic not in logs:
            logs[span.topic] = TopicLog(client, span.topic)
        partition = QueuePartition(
            options.address,
            span.topic,
            int(logs[span.topic].described["topic_id"]),
            span.queue_id,
            tuple(pieces(logs[span.topic], span, pushed=pushed)),
            options.fail_on_data_loss,
            pushed,
        )
        if partition.pieces:
            found.append(partition)
    return found


def cut(spans: list[Span], *, options: ReadOptions) -> list[Span]:
    """Split spans into at least ``minPartitions``, each of at most ``maxRecordsPerPartition``."""
    total = sum(span.rows for span in spans)
    most = options.max_records or max(1, total)
    parts = []
    for span in spans:
        n = -(-span.rows // most)
        if options.min_partitions is not None and len(spans) < options.min_partitions:
            n = max(n, -(-span.rows * options.min_partitions // total))
        parts += list(span.parts(n))
    return parts


def pieces(log: TopicLog, span: Span, *, pushed: Pushed | None = None) -> Iterator[FilePiece]:
    """Yield the pieces of a span: ranges in segments, and the others at the broker.

    Segments that have no matches of the filters are left out.
    """
    at = span.start
    for segment in sorted(log.segments, key=_base):
        if segment.queue_id != span.queue_id or segment.end <= at or segment.base >= span.end:
            continue
        if at < segment.base:
            yield FilePiece(at, segment.base)
        low, high = max(at, segment.base), min(segment.end, span.end)
        if pushed is None or pushed.may_be_in(segment.facts):
            yield FilePiece(low, high, path_in(log.root, segment.path), segment.base)
        at = high
    if at < span.end:
        yield FilePiece(at, span.end)


def narrowed(client: Client, span: Span, *, pushed: Pushed) -> Span:
    """Return the part of a span that may have matches; an empty one if there is none.

    The messages of a queue are in the order of stored_at_ms, so a range of it is one of offsets.
    """
    if span.rows <= 0:
        return span
    if not pushed.holds_for(span.topic, span.queue_id):
        return replace(span, end=span.start)
    start, end = span.start, span.end
    low, high = pushed.range("queue_offset")
    start = start if low is None else max(start, low)
    end = end if high is None else min(end, high + 1)
    low_ms, high_ms = pushed.range("stored_at_ms")
    if low_ms is not None and low_ms > 0 and start < end:
        at_ms = min(low_ms, limits.TIME_MAX_MS)
        start = max(start, client.offset_at(span.topic, span.queue_id, at_ms=at_ms))
    if high_ms is not None and high_ms < limits.TIME_MAX_MS and start < end:
        at_ms = max(high_ms + 1, 0)
        end = min(end, client.offset_at(span.topic, span.queue_id, at_ms=at_ms))
    return replace(span, start=start, end=max(start, end))


def _base(segment: Segment) -> int:
    return segment.base


def rows_of(partition: InputPartition, schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a task, in the columns and types of Spark's schema."""
    if not isinstance(partition, QueuePartition):
        return  # Spark's own empty partition: there is nothing to read
    wanted = to_arrow_schema(schema, timezone="UTC")
    for table in partition.batches(wanted.names):
        yield from table.cast(wanted).to_batches()


class BatchReader(DataSourceReader):
    """Reader of the messages between two bounds; the planning of the read resolves the bounds."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options, self._schema = options, schema
        self._pushed = Pushed()

    @override
    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks of the read; asks the broker for offsets and segments."""
        options = self._options
        with options.address.connect() as client:
            spans = []
            topics = offsets.subscribed(client, options)
            offsets.check_some(topics, options)
            for topic, held in topics.items():
                first = offsets.resolve(client, held, bound=options.starting, options=options).at
                last = offsets.resolve(client, held, bound=options.ending, options=options).at
                spans += [Span(topic, queue, at, last[queue]) for queue, at in first.items()]
            for span in spans:
                if span.rows < 0:
                    raise RequestError(
                        f"The read of queue {span.queue_id} of topic {span.topic} starts at offset"
                        f" {span.start}, after its end {span.end}."
                    )
            pushed = self._pushed
            wanted = [narrowed(client, span, pushed=pushed) for span in spans]
            return plan_partitions(client, wanted, options=options, pushed=pushed)

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition inside a task."""
        return rows_of(partition, self._schema)


class FilteringReader(BatchReader):
    """Batch reader that evaluates filters of the query; only with the option ``pushFilters``.

    Spark 4.3 stores the plan of a read at the loaded DataFrame, not at the query. So a second query
    over the same DataFrame would get the rows that the filters of the first one left.
    """

    @override
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take the filters that the read can use; return those that Spark must evaluate."""
        self._pushed, left = Pushed.of(filters, self._schema)
        return left


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Streaming reader; the offsets in Spark's checkpoint decide where it continues.

    With a group, it commits to the broker the offsets that the query has durably processed.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options, self._schema = options, schema
        self._client: Client | None = None
        #: The end of the query; None: it has no end.
        self._target: dict[str, Offsets] | None = None
        #: Offsets committed to the broker; None: the group has not subscribed yet.
        self._reported: dict[str, Offsets] | None = None

    @override
    def initialOffset(self) -> dict[str, Any]:
        """Return the offsets at which a query without a checkpoint begins."""
        options, topics = self._options, self._held()
        offsets.check_some(topics, options)
        found = {
            topic: offsets.resolve(self._broker(), held, bound=options.starting, options=options)
            for topic, held in topics.items()
        }
        return offsets.to_json(found)

    @override
    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a micro-batch from maxOffsetsPerTrigger."""
        limit = self._options.max_offsets
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    @override
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next micro-batch; ``start`` if there is nothing to read."""
        begun = offsets.from_json(start)
        held = self._held()
        offsets.check_deleted(held, begun, options=self._options)
        end = self._ends(held)
        first = {topic: self._first(held[topic], begun.get(topic)) for topic in end}
        # Spark has checkpointed ``start``, so the messages before it are in the sink.
        self._report(begun)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return offsets.to_json(offsets.limited(first, _not_before(first, end), limit=most))

    @override
    def reportLatestOffset(self) -> dict[str, Any]:
        """Return the end offsets, for the progress report of the query."""
        return offsets.to_json({topic: held.ends() for topic, held in self._held().items()})

    @override
    def prepareForTriggerAvailableNow(self) -> None:
        """Make the query end at the present end offsets."""
        self._target = {topic: held.ends() for topic, held in self._held().items()}

    @override
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks of a micro-batch, also of one that Spark repeats."""
        begun, wanted = offsets.from_json(start), offsets.from_json(end)
        held = self._held()
        spans = []
        for topic, last in wanted.items():
            if topic not in held:
                continue  # the query no longer subscribes to it
            if not offsets.is_same(held[topic], last, options=self._options):
                continue  # the batch was of a deleted topic
            first = self._first(held[topic], begun.get(topic)).at
            spans += [
                Span(topic, q, at, min(last.at[q], held[topic].bounds[q][1]))
                for q, at in first.items()
                if q in last.at
            ]
        return plan_partitions(self._broker(), spans, options=self._options)

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition inside a task."""
        return rows_of(partition, self._schema)

    @override
    def commit(self, end: dict[str, Any]) -> None:
        """Commit the end of a finished micro-batch to the broker."""
        self._report(offsets.from_json(end))

    @override
    def stop(self) -> None:
        """Close the connection when the query ends."""
        if self._client is not None:
            self._client.close()

    def _broker(self) -> Client:
        if self._client is None:
            self._client = self._options.address.connect()
        return self._client

    def _held(self) -> dict[str, TopicBounds]:
        return offsets.subscribed(self._broker(), self._options)

    def _ends(self, held: Mapping[str, TopicBounds]) -> dict[str, Offsets]:
        """Return the offsets up to which the query reads now."""
        if self._target is None:
            return {topic: found.ends() for topic, found in held.items()}
        ends = {}
        for topic, found in held.items():
            if topic not in self._target:
                continue  # it was created after the query began
            if self._target[topic].topic_id != found.topic_id:
                # The topic was created again; offsets of its predecessor mean nothing in it.
                self._target[topic] = found.ends()
            wanted = self._target[topic].at
            # A checkpoint after the end would skip the messages that come there.
            last = {q: min(wanted[q], high) for q, (_, high) in found.bounds.items() if q in wanted}
            ends[topic] = Offsets(found.topic_id, last)
        return ends

    def _first(self, held: TopicBounds, begun: Offsets | None) -> Offsets:
        """Return the next offsets of a topic: the end of the last batch, or the first retained."""
        if begun is None or not offsets.is_same(held, begun, options=self._options):
            return Offsets(held.topic_id, {queue: low for queue, (low, _) in held.bounds.items()})
        found = {
            # A queue that was added since then begins at 0.
            queue: offsets.begin(
                held, queue, at=min(begun.at.get(queue, 0), high), options=self._options
            )
            for queue, (_, high) in held.bounds.items()
        }
        return Offsets(held.topic_id, found)

    def _report(self, done: Mapping[str, Offsets]) -> None:
        group = self._options.group
        if group is None or done == self._reported:
            return
        try:
            for topic, held in self._held().items():
                reached = done.get(topic)
                # Offsets of a deleted topic mean nothing in its successor.
                if reached is not None and reached.topic_id == held.topic_id:
                    self._broker().subscribe(group, topic)
                    at = {q: min(at, held.bounds[q][1]) for q, at in reached.at.items()}
                    self._broker().update_offsets(group, topic, offsets=at)
        except BrokerUnavailableError as error:
            log.warning(
                "The offsets of group %s could not be committed; the next batch repeats it: %s",
                group,
                error,
            )
        else:
            self._reported = dict(done)


def _not_before(first: Mapping[str, Offsets], end: Mapping[str, Offsets]) -> dict[str, Offsets]:
    """Return the ends, moved up to ``first`` where they precede it."""
    return {
        topic: Offsets(
            first[topic].topic_id,
            {q: max(at, found.at.get(q, 0)) for q, at in first[topic].at.items()},
        )
        for topic, found in end.items()
    }
