"""``@spark_consumer``: a consumer whose windows are Spark sessions."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import dagster as dg
from dagster_pyspark import LazyPySparkResource

from rmq_pipeline.orchestration.broker_resource import BrokerResource
from rmq_pipeline.orchestration.consumer import ConsumerConfig, Declaration, Hold, Materialized
from rmq_pipeline.orchestration.sink_resource import SinkResource
from rmq_pipeline.spark import java
from rmq_pipeline.spark.consumer import run_window
from rmq_pipeline.spark.session import prepare_environment

SPARK_TAG: Final = "rmq/spark"


@dataclass(frozen=True, kw_only=True)
class spark_consumer(Declaration):  # noqa: N801 - read as a decorator
    """Decorator that makes a consumer of a handler; Spark's workers import the handler by name."""

    engine: ClassVar[str] = "pyspark"
    tag: ClassVar[str] = SPARK_TAG
    resources: ClassVar[frozenset[str]] = frozenset({"spark"})

    parallelism: int = 2

    def lacks(self, resources: Any) -> str:
        """Return why Spark cannot start a JVM here; Spark Connect needs none here."""
        settings = getattr(resources.spark, "spark_config", None)
        if settings is None or "spark.remote" in settings or "SPARK_REMOTE" in os.environ:
            return ""
        return java.lacks()

    def window(self, hold: Hold) -> Callable[..., Materialized]:
        """Return a window function that uses the session of the resource ``spark``."""

        def window(
            context: dg.AssetExecutionContext,
            *,
            config: ConsumerConfig,
            broker: BrokerResource,
            sinks: SinkResource,
            spark: LazyPySparkResource,
        ) -> Materialized:
            prepare_environment()
            in_spark = partial(run_window, spark=lambda: spark.spark_session)
            yield from hold(context, config=config, broker=broker, sinks=sinks, run_window=in_spark)

        return window
