"""Reading topics: once, and as a stream whose progress the broker knows."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType
from typing_extensions import override

from rmq_pipeline.errors import RequestError
from rmq_pipeline.spark.source import queues
from rmq_pipeline.spark.source.options import ReadOptions
from rmq_pipeline.spark.source.planning import Span, planned
from rmq_pipeline.spark.source.stretch import Stretch


def rows_of(partition: InputPartition, schema: StructType) -> Iterator[pa.RecordBatch]:
    """The messages of a task, in the columns and types that Spark was told."""
    if not isinstance(partition, Stretch):
        return  # Spark's own, where there is nothing to read
    wanted = to_arrow_schema(schema, timezone="UTC")
    for table in partition.batches(wanted.names):
        yield from table.cast(wanted).to_batches()


class BatchReader(DataSourceReader):
    """Reads what lies between two bounds when the read is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options, self._schema = options, schema

    @override
    def partitions(self) -> Sequence[InputPartition]:
        """Ask the broker what there is."""
        options = self._options
        with options.address.connect() as client:
            spans = []
            for topic in options.topics:
                held = queues.Held.of(client, topic)
                first = queues.resolved(client, held, bound=options.starting, options=options).at
                last = queues.resolved(client, held, bound=options.ending, options=options).at
                spans += [Span(topic, queue, at, last[queue]) for queue, at in first.items()]
            for span in spans:
                if span.rows < 0:
                    raise RequestError(
                        f"Queue {span.queue_id} of topic {span.topic} would be read from"
                        f" {span.start} to {span.end}."
                    )
            return planned(client, spans, options=options)

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a task."""
        return rows_of(partition, self._schema)
