"""Streaming reads of topics; with a group, the broker shows the query's progress."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType
from typing_extensions import override

from rmq_pipeline.errors import BrokerUnavailableError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.spark.source import queues
from rmq_pipeline.spark.source.options import ReadOptions
from rmq_pipeline.spark.source.planning import Span, plan
from rmq_pipeline.spark.source.queues import Offsets, TopicBounds
from rmq_pipeline.spark.source.reader import rows_of

log = logging.getLogger(__name__)


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
        options = self._options
        found = {
            topic: queues.resolve(self._broker(), held, bound=options.starting, options=options)
            for topic, held in self._held().items()
        }
        return queues.to_json(found)

    @override
    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a micro-batch from maxOffsetsPerTrigger."""
        limit = self._options.max_offsets
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    @override
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next micro-batch; ``start`` if there is nothing to read."""
        begun = queues.from_json(start)
        held = self._held()
        end = {topic: found.ends() for topic, found in held.items()}
        if self._target is not None:
            end = {topic: found for topic, found in self._target.items() if topic in end}
        first = {topic: self._first(held[topic], begun.get(topic)) for topic in end}
        # Spark has checkpointed ``start``, so the messages before it are in the sink.
        self._report(begun)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return queues.to_json(queues.limited(first, _not_before(first, end), limit=most))

    @override
    def reportLatestOffset(self) -> dict[str, Any]:
        """Return the end offsets, for the progress report of the query."""
        return queues.to_json({topic: held.ends() for topic, held in self._held().items()})

    @override
    def prepareForTriggerAvailableNow(self) -> None:
        """Make the query end at the present end offsets."""
        self._target = {topic: held.ends() for topic, held in self._held().items()}

    @override
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks of a micro-batch, also of one that Spark repeats."""
        begun, wanted = queues.from_json(start), queues.from_json(end)
        held = self._held()
        spans = []
        for topic, last in wanted.items():
            if topic not in held:
                continue  # the query no longer subscribes to it
            if not queues.is_same(held[topic], last, options=self._options):
                continue  # the batch was of a deleted topic
            first = self._first(held[topic], begun.get(topic)).at
            spans += [
                Span(topic, q, at, min(last.at[q], held[topic].bounds[q][1]))
                for q, at in first.items()
                if q in last.at
            ]
        return plan(self._broker(), spans, options=self._options)

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition inside a task."""
        return rows_of(partition, self._schema)

    @override
    def commit(self, end: dict[str, Any]) -> None:
        """Commit the end of a finished micro-batch to the broker."""
        self._report(queues.from_json(end))

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
        return {topic: TopicBounds.of(self._broker(), topic) for topic in self._options.topics}

    def _first(self, held: TopicBounds, begun: Offsets | None) -> Offsets:
        """Return the next offsets of a topic: the end of the last batch, or the first retained."""
        if begun is None or not queues.is_same(held, begun, options=self._options):
            return Offsets(held.topic_id, {queue: low for queue, (low, _) in held.bounds.items()})
        found = {
            # A queue that was added since then begins at 0.
            queue: queues.begin(
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
                offsets = done.get(topic)
                # Offsets of a deleted topic mean nothing in its successor.
                if offsets is not None and offsets.topic_id == held.topic_id:
                    self._broker().subscribe(group, topic)
                    at = {q: min(at, held.bounds[q][1]) for q, at in offsets.at.items()}
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
