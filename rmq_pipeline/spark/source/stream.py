"""Reading topics as a stream whose progress the broker knows."""

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
from rmq_pipeline.spark.source.planning import Span, planned
from rmq_pipeline.spark.source.queues import Held, Offsets
from rmq_pipeline.spark.source.reader import rows_of

log = logging.getLogger(__name__)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Goes from offsets to offsets; those of the checkpoint are what counts.

    With a group, the broker is told of them: of what is behind the query for good.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options, self._schema = options, schema
        self._client: Client | None = None
        #: Where the query is to end, when it is to end.
        self._target: dict[str, Offsets] | None = None
        #: What the broker knows; None: the group has not subscribed yet.
        self._reported: dict[str, Offsets] | None = None

    @override
    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins."""
        options = self._options
        found = {
            topic: queues.resolved(self._broker(), held, bound=options.starting, options=options)
            for topic, held in self._held().items()
        }
        return queues.to_json(found)

    @override
    def getDefaultReadLimit(self) -> ReadLimit:
        """What maxOffsetsPerTrigger says."""
        limit = self._options.max_offsets
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    @override
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Where the next micro-batch ends; ``start`` when there is nothing to read."""
        begun = queues.from_json(start)
        held = self._held()
        end = {topic: found.ends() for topic, found in held.items()}
        if self._target is not None:
            end = {topic: found for topic, found in self._target.items() if topic in end}
        first = {topic: self._first(held[topic], begun.get(topic)) for topic in end}
        # Whatever lies before is in the sink, and Spark has written so down.
        self._report(begun)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return queues.to_json(queues.admitted(first, _not_before(first, end), limit=most))

    @override
    def reportLatestOffset(self) -> dict[str, Any]:
        """For the progress of the query."""
        return queues.to_json({topic: held.ends() for topic, held in self._held().items()})

    @override
    def prepareForTriggerAvailableNow(self) -> None:
        """The query ends with what is there now."""
        self._target = {topic: held.ends() for topic, held in self._held().items()}

    @override
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a micro-batch, of a repeated one as well."""
        begun, wanted = queues.from_json(start), queues.from_json(end)
        held = self._held()
        spans = []
        for topic, last in wanted.items():
            if topic not in held:
                continue  # the query does not subscribe to it any more
            if not queues.is_same(held[topic], last, options=self._options):
                continue  # what the batch was of is gone
            first = self._first(held[topic], begun.get(topic)).at
            spans += [
                Span(topic, q, at, min(last.at[q], held[topic].bounds[q][1]))
                for q, at in first.items()
                if q in last.at
            ]
        return planned(self._broker(), spans, options=self._options)

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        return rows_of(partition, self._schema)

    @override
    def commit(self, end: dict[str, Any]) -> None:
        """The micro-batch that ends there is done."""
        self._report(queues.from_json(end))

    @override
    def stop(self) -> None:
        """The query is over."""
        if self._client is not None:
            self._client.close()

    def _broker(self) -> Client:
        if self._client is None:
            self._client = self._options.address.connect()
        return self._client

    def _held(self) -> dict[str, Held]:
        return {topic: Held.of(self._broker(), topic) for topic in self._options.topics}

    def _first(self, held: Held, begun: Offsets | None) -> Offsets:
        """What is read next of a topic: where the last batch ended, or from the beginning on."""
        if begun is None or not queues.is_same(held, begun, options=self._options):
            return Offsets(held.topic_id, {queue: low for queue, (low, _) in held.bounds.items()})
        found = {
            # A queue that was added since begins at 0.
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
                # Those of a topic that is gone say nothing of its successor.
                if offsets is not None and offsets.topic_id == held.topic_id:
                    self._broker().subscribe(group, topic)
                    at = {q: min(at, held.bounds[q][1]) for q, at in offsets.at.items()}
                    self._broker().update_offsets(group, topic, offsets=at)
        except BrokerUnavailableError as error:
            log.warning("The broker is told later how far group %s is: %s", group, error)
        else:
            self._reported = dict(done)


def _not_before(first: Mapping[str, Offsets], end: Mapping[str, Offsets]) -> dict[str, Offsets]:
    """The ends, none of which lies before where reading begins."""
    return {
        topic: Offsets(
            first[topic].topic_id,
            {q: max(at, found.at.get(q, 0)) for q, at in first[topic].at.items()},
        )
        for topic, found in end.items()
    }
