"""The resources broker, sinks and spark of each deployment.

RMQ_DEPLOYMENT selects one: ``local`` (the default) or ``production``. `rmq up`, `rmq demo` and the
tests use ``local``, and set RMQ_HOME or RMQ_FLIGHT.
"""

import os
from typing import Any, Final

import dagster as dg

from rmq_pipeline.orchestration.resources import BrokerResource, SinkResource
from rmq_pipeline.orchestration.spark_resource import LazyPySparkResource
from rmq_pipeline.spark.session import settings

DEPLOYMENTS: Final = ("local", "production")


def local() -> dict[str, Any]:
    """Return a broker on this machine, found by RMQ_FLIGHT or RMQ_HOME, and Spark in local mode."""
    return {
        "broker": BrokerResource(),
        "sinks": SinkResource(),
        "spark": LazyPySparkResource(spark_config=settings()),
    }


def production() -> dict[str, Any]:
    """Return a broker by address and token, sinks on shared storage, and a Spark cluster.

    RMQ_SPARK_MASTER is a Spark master, or the sc://host:port of a Spark Connect server.
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
        # A Spark Connect server has its own settings; a client may only set the address.
        return {"spark.remote": master}
    chosen = {"spark.master": master} if master else {}
    return settings(chosen)


def resources_of(deployment: str | None = None) -> dict[str, Any]:
    """Return the resources of a deployment; default: RMQ_DEPLOYMENT.

    Raises:
        ValueError: the deployment does not exist.
    """
    chosen = deployment or os.environ.get("RMQ_DEPLOYMENT", "local")
    if chosen not in DEPLOYMENTS:
        raise ValueError(f"RMQ_DEPLOYMENT is one of {', '.join(DEPLOYMENTS)}, not {chosen!r}")
    return production() if chosen == "production" else local()
