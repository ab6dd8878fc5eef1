"""What broker, sinks and Spark are, per deployment.

RMQ_DEPLOYMENT chooses: ``local`` (the default: `rmq up`, `rmq demo` and tests, which say where
their broker is with RMQ_HOME or RMQ_FLIGHT) or ``production``.
"""

import os
from typing import Any, Final

import dagster as dg
from dagster_pyspark import LazyPySparkResource

from rmq_pipeline.orchestration.broker_resource import BrokerResource
from rmq_pipeline.orchestration.sink_resource import SinkResource
from rmq_pipeline.spark.session import settings

DEPLOYMENTS: Final = ("local", "production")


def local() -> dict[str, Any]:
    """A broker on this machine, found by RMQ_FLIGHT or RMQ_HOME, and Spark in local mode."""
    return {
        "broker": BrokerResource(),
        "sinks": SinkResource(),
        "spark": LazyPySparkResource(spark_config=settings()),
    }


def production() -> dict[str, Any]:
    """A broker by address and token, sinks on shared storage, and a cluster.

    RMQ_SPARK_MASTER is a Spark master, or sc://host:port of a Spark Connect server.
    """
    return {
        "broker": BrokerResource(
            address=dg.EnvVar("RMQ_FLIGHT"),
            token=dg.EnvVar("RMQ_TOKEN") if "RMQ_TOKEN" in os.environ else None,
        ),
        "sinks": SinkResource(root=dg.EnvVar("RMQ_SINKS")),
        "spark": LazyPySparkResource(spark_config=_cluster(os.environ.get("RMQ_SPARK_MASTER"))),
    }


def _cluster(master: str | None) -> dict[str, str]:
    if master and master.startswith("sc://"):
        # The server has its own settings; a client may only say where it is.
        return {"spark.remote": master}
    chosen = {"spark.master": master} if master else {}
    return settings(chosen)


def resources(deployment: str | None = None) -> dict[str, Any]:
    """The resources of a deployment, RMQ_DEPLOYMENT by default.

    Raises:
        ValueError: there is no deployment of this name.
    """
    chosen = deployment or os.environ.get("RMQ_DEPLOYMENT", "local")
    if chosen not in DEPLOYMENTS:
        raise ValueError(f"RMQ_DEPLOYMENT is one of {', '.join(DEPLOYMENTS)}, not {chosen!r}")
    return production() if chosen == "production" else local()
