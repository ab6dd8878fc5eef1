"""Windows of a consumer that runs in Spark."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import Unpack

from rmq_pipeline.handling import run
from rmq_pipeline.handling.report import BatchReport, WindowReport
from rmq_pipeline.handling.run import Terms
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.spark.engine import SparkEngine
from rmq_pipeline.verbs import Verbs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["BatchReport", "ConsumerSpec", "WindowReport", "run_window"]


def run_window(
    spec: ConsumerSpec,
    verbs: Verbs,
    *,
    spark: "Callable[[], SparkSession]",
    parallelism: int = 2,
    handoff: Path | None = None,
    **terms: Unpack[Terms],
) -> WindowReport:
    """Run a window of ``handling.run`` that handles a group's messages in Spark.

    Args:
        spec: the consumer.
        verbs: flight.client.Client, or the broker itself.
        spark: returns the session; called once the first message has been received.
        parallelism: tasks of a micro-batch.
        handoff: a folder that driver and tasks reach; None: below the sink, or a temporary one.
        terms: see handling.run.Terms.
    """
    parent = handoff or (spec.sink / "_handoff" if spec.sink else None)
    with SparkEngine(spark, parallelism=parallelism, handoff=parent) as engine:
        return run.run_window(spec, verbs, engine=engine, **terms)
