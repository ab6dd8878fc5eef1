"""What a Dagster project imports: ``definitions``, and the parts of a pipeline.

``from rmq_pipeline.dagster import definitions, Pipeline, topic, spark_consumer``. Needs the extra
``dagster``; Spark consumers need ``spark``, too.
"""

from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.orchestration.checks import Thresholds
from rmq_pipeline.orchestration.components.parts import (
    ConsumerComponent,
    GroupComponent,
    TopicComponent,
    TransactionCheckerComponent,
)
from rmq_pipeline.orchestration.components.project import BrokerComponent
from rmq_pipeline.orchestration.consumer import python_consumer, spark_consumer
from rmq_pipeline.orchestration.declarations import consumer_group, topic
from rmq_pipeline.orchestration.definitions import definitions
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.orchestration.resources import BrokerResource, SinkResource
from rmq_pipeline.orchestration.transaction_checker import transaction_checker

__all__ = [
    "BrokerComponent",
    "BrokerResource",
    "ConsumerComponent",
    "GroupComponent",
    "Outcome",
    "Pipeline",
    "SinkResource",
    "Thresholds",
    "TopicComponent",
    "TransactionCheckerComponent",
    "consumer_group",
    "definitions",
    "python_consumer",
    "spark_consumer",
    "topic",
    "transaction_checker",
]
