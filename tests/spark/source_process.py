"""A streaming query in a process of its own, to be killed."""

import json
import sys
from typing import TYPE_CHECKING, Any

from rmq_pipeline.spark import session
from tests.spark.warm_daemon import SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def start(
    spark: "SparkSession", *, source: dict[str, Any], sink: dict[str, str], **trigger: Any
) -> "StreamingQuery":
    """A query from topics into a folder of Parquet files; ``trigger`` as Spark takes it."""
    frame = spark.readStream.format("rocketmq").options(**source).load()
    writer = frame.writeStream.format("parquet").options(**sink)
    return (writer.trigger(**trigger) if trigger else writer).start()


if __name__ == "__main__":
    start(session.start(SETTINGS), **json.loads(sys.argv[1])).awaitTermination()
