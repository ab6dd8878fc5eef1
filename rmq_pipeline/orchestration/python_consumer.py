"""``@python_consumer``: a consumer whose windows are threads in the process of their run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

import dagster as dg

from rmq_pipeline.consumer.window import run_window
from rmq_pipeline.orchestration.broker_resource import BrokerResource
from rmq_pipeline.orchestration.consumer import ConsumerConfig, Declaration, Hold, Materialized
from rmq_pipeline.orchestration.sink_resource import SinkResource

PYTHON_TAG: Final = "rmq/python"


@dataclass(frozen=True, kw_only=True)
class python_consumer(Declaration):  # noqa: N801 - read as a decorator
    """Decorator that makes a consumer of a handler, like ``spark_consumer`` but without a JVM.

    The handler is called by up to ``parallelism`` threads at once, each for another message group.
    """

    engine: ClassVar[str] = "python"
    tag: ClassVar[str] = PYTHON_TAG

    parallelism: int = 8
    #: Small enough that finished messages are settled at short intervals.
    max_batch: int = 20_000

    def window(self, hold: Hold) -> Callable[..., Materialized]:
        """Return a window function that needs only the broker."""

        def window(
            context: dg.AssetExecutionContext,
            *,
            config: ConsumerConfig,
            broker: BrokerResource,
            sinks: SinkResource,
        ) -> Materialized:
            yield from hold(
                context, config=config, broker=broker, sinks=sinks, run_window=run_window
            )

        return window
