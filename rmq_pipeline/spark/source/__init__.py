"""Spark's data source ``rocketmq``: any Spark job can read and write topics (docs)."""

from rmq_pipeline.spark.source.data_source import RocketMQDataSource, register
from rmq_pipeline.spark.source.writer import by_message_group

__all__ = ["RocketMQDataSource", "by_message_group", "register"]
