"""Spark's data source ``rocketmq``: any Spark job can read and write topics (docs)."""

from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType
from typing_extensions import override

from rmq_pipeline.errors import RequestError
from rmq_pipeline.spark.source import options
from rmq_pipeline.spark.source.offsets import known
from rmq_pipeline.spark.source.reader import BatchReader, FilteringReader, StreamReader
from rmq_pipeline.spark.source.writer import BatchWriter, StreamWriter, by_message_group

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["RocketMQDataSource", "by_message_group", "register"]

#: schema.READ as Spark types, and the topic.
COLUMNS: Final = {
    "topic": "string",
    "queue_id": "int",
    "queue_offset": "bigint",
    "message_id": "string",
    "tag": "string",
    "keys": "array<string>",
    "message_group": "string",
    "properties": "map<string,string>",
    "body": "binary",
    "born_at_ms": "bigint",
    "stored_at_ms": "bigint",
    "deliver_at_ms": "bigint",
}


class RocketMQDataSource(DataSource):
    """Data source for topics; its options are those of Spark's Kafka source (docs)."""

    @classmethod
    @override
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "rocketmq"

    @override
    def schema(self) -> str:
        """Return all columns; a read may choose fewer by a schema of its own."""
        wanted = dict(COLUMNS)
        if not options.includes_headers(self.options):
            del wanted["properties"]
        return ", ".join(f"{name} {type_}" for name, type_ in wanted.items())

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader for ``spark.read``."""
        _check_columns(schema)
        chosen = options.for_batch(self.options)
        return (FilteringReader if chosen.push_filters else BatchReader)(chosen, schema)

    @override
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader for ``spark.readStream``."""
        _check_columns(schema)
        return StreamReader(options.for_stream(self.options), schema)

    @override
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer for ``frame.write``."""
        if overwrite:
            raise RequestError("A topic cannot be overwritten. Use mode append.")
        chosen = options.for_write(self.options)
        writer = BatchWriter(chosen, schema.fieldNames())
        _check_topic(chosen)
        return writer

    @override
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return the writer for ``frame.writeStream``."""
        if overwrite:
            raise RequestError("A topic cannot be overwritten. Use output mode append or update.")
        chosen = options.for_write(self.options)
        writer = StreamWriter(chosen, schema.fieldNames())
        _check_topic(chosen)
        return writer


def register(spark: "SparkSession") -> None:
    """Register the format ``rocketmq`` in a session."""
    spark.dataSource.register(RocketMQDataSource)


def _check_columns(schema: StructType) -> None:
    for name in schema.fieldNames():
        if name not in COLUMNS:
            raise RequestError(f"A message has no column {name}; it has {', '.join(COLUMNS)}.")


def _check_topic(chosen: options.WriteOptions) -> None:
    """Look for the topic of a write on the driver, before any task starts."""
    if chosen.topic is not None:
        with chosen.address.connect() as client:
            known(client, chosen.topic)
