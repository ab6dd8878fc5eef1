"""A window of a Spark consumer."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import Unpack

from rmq_pipeline.handling import run
from rmq_pipeline.handling.report import BatchReport, WindowReport
from rmq_pipeline.handling.run import Terms
from rmq_pipeline.handling.spec import ConsumerSpec
from rmq_pipeline.handling.verbs import Verbs
from rmq_pipeline.spark.engine import SparkEngine

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
    """Handle a group's messages in Spark, in a window of ``handling.run``.

    Args:
        spec: the consumer.
        verbs: flight.client.Client, or the broker itself.
        spark: gives the session; called when the first message is there.
        parallelism: tasks of a micro-batch.
        handoff: a folder that driver and tasks reach; None: below the sink, or a temporary one.
        terms: as handling.run.Terms says.
    """
    parent = handoff or (spec.sink / "_handoff" if spec.sink else None)
    with SparkEngine(spark, parallelism=parallelism, handoff=parent) as engine:
        return run.run_window(spec, verbs, engine=engine, **terms)
