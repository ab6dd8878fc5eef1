"""Spark's data source ``rocketmq``: topics read and written by any Spark job (docs)."""

from rmq_pipeline.spark.source.data_source import RocketMQDataSource, register
from rmq_pipeline.spark.source.writer import by_message_group

__all__ = ["RocketMQDataSource", "by_message_group", "register"]
