"""``@python_consumer``: a consumer whose windows are threads of their run's own process."""

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
    """Makes a consumer of a handler, as ``spark_consumer`` does; without a JVM.

    The handler is called by ``parallelism`` threads at once, each with another message group.
    """

    engine: ClassVar[str] = "python"
    tag: ClassVar[str] = PYTHON_TAG

    parallelism: int = 8
    #: Small enough that what waits for others is settled now and then.
    max_batch: int = 20_000

    def window(self, hold: Hold) -> Callable[..., Materialized]:
        """A window that needs nothing but the broker."""

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
