"""Planning of a read: the offset ranges of its tasks, and the location of each part."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rmq_pipeline.flight.client import Client
from rmq_pipeline.spark.replay.topic_log import Segment, TopicLog
from rmq_pipeline.spark.source.options import ReadOptions
from rmq_pipeline.spark.source.partition import Piece, QueuePartition


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


def plan(client: Client, spans: Iterable[Span], *, options: ReadOptions) -> list[QueuePartition]:
    """Return the tasks of a read: one per queue, or more if the options ask for more."""
    found = []
    logs: dict[str, TopicLog] = {}
    for span in cut([span for span in spans if span.rows > 0], options=options):
        if span.topic not in logs:
            logs[span.topic] = TopicLog(client, span.topic)
        partition = QueuePartition(
            options.address,
            span.topic,
            int(logs[span.topic].described["topic_id"]),
            span.queue_id,
            tuple(pieces(logs[span.topic], span)),
            options.fail_on_data_loss,
        )
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


def pieces(log: TopicLog, span: Span) -> Iterator[Piece]:
    """Yield the pieces of a span: ranges in segments, and the others at the broker."""
    at = span.start
    for segment in sorted(log.segments, key=_base):
        if segment.queue_id != span.queue_id or segment.end <= at or segment.base >= span.end:
            continue
        if at < segment.base:
            yield Piece(at, segment.base)
        low, high = max(at, segment.base), min(segment.end, span.end)
        yield Piece(low, high, f"{log.root}/{segment.path}", segment.base)
        at = high
    if at < span.end:
        yield Piece(at, span.end)


def _base(segment: Segment) -> int:
    return segment.base
