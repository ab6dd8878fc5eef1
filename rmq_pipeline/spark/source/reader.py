"""Batch reads of topics."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType
from typing_extensions import override

from rmq_pipeline.errors import RequestError
from rmq_pipeline.spark.source import queues
from rmq_pipeline.spark.source.options import ReadOptions
from rmq_pipeline.spark.source.partition import QueuePartition
from rmq_pipeline.spark.source.planning import Span, plan


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

    @override
    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks of the read; asks the broker for offsets and segments."""
        options = self._options
        with options.address.connect() as client:
            spans = []
            for topic in options.topics:
                held = queues.TopicBounds.of(client, topic)
                first = queues.resolve(client, held, bound=options.starting, options=options).at
                last = queues.resolve(client, held, bound=options.ending, options=options).at
                spans += [Span(topic, queue, at, last[queue]) for queue, at in first.items()]
            for span in spans:
                if span.rows < 0:
                    raise RequestError(
                        f"The read of queue {span.queue_id} of topic {span.topic} starts at offset"
                        f" {span.start}, after its end {span.end}."
                    )
            return plan(client, spans, options=options)

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition inside a task."""
        return rows_of(partition, self._schema)
