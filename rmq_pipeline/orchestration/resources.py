"""Dagster resources: the broker as a Flight client, the folder of the sinks, and Spark.

RMQ_DEPLOYMENT selects them: ``local`` (the default) or ``production``. `rmq up`, `rmq demo` and the
tests use ``local``, and set RMQ_HOME or RMQ_FLIGHT.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import dagster as dg

from rmq_pipeline.endpoint import sinks_root
from rmq_pipeline.extras import lacking
from rmq_pipeline.flight.client import Client
from rmq_pipeline.spark.session import settings
from rmq_pipeline.storage.root import Address, below

__all__ = ["BrokerResource", "LazyPySparkResource", "SinkResource", "resources_of"]

# Without the extra ``spark`` a project has the same assets. Their runs that need a session fail
# with the remedy, and ``spark_consumer`` requests no window.
if TYPE_CHECKING:
    from dagster_pyspark import LazyPySparkResource
else:
    try:
        from dagster_pyspark import LazyPySparkResource
    except ModuleNotFoundError:

        class LazyPySparkResource(dg.ConfigurableResource):
            """Stands in for the resource of dagster-pyspark, which is not installed."""

            spark_config: dict[str, Any] = {}  # noqa: RUF012 - as in the other one

            @property
            def spark_session(self) -> NoReturn:
                """Say what to install.

                Raises:
                    MissingExtraError: always.
                """
                raise lacking("spark", "pyspark")


#: Windows survive a restart of the broker that takes less than this.
RETRY_S: Final = 30.0


class BrokerResource(dg.ConfigurableResource["BrokerResource"]):
    """Address of the broker, and credentials.

    Without settings, RMQ_FLIGHT and RMQ_HOME are read at run time, as in every client.
    """

    #: host:port of the Flight endpoint; those of a leader and its standbys, separated by commas.
    address: str | None = None
    #: A home on this machine; its endpoint file contains the address and the token.
    home: str | None = None
    #: Refuse a start of the broker with another token; that of a home is in its endpoint file.
    token: str | None = None
    #: User of the calls, if the broker has access control. Default: RMQ_USER and RMQ_PASSWORD.
    user: str | None = None
    password: str | None = None
    #: A PEM file of trusted certificates; the connection is then encrypted.
    certificate: str | None = None

    @contextmanager
    def client(self, *, retry_s: float = RETRY_S) -> Iterator[Client]:
        """Yield a client for the duration of a ``with`` block.

        Args:
            retry_s: how long repeatable verbs are retried while no broker answers.
        """
        client = Client(
            self.address,
            home=self.home,
            token=self.token,
            user=self.user,
            password=self.password,
            certificate=self.certificate,
            retry_s=retry_s,
        )
        try:
            yield client
        finally:
            client.close()


class SinkResource(dg.ConfigurableResource["SinkResource"]):
    """The parent folder of all sinks: a path, or a URI such as ``s3://bucket/sinks``."""

    #: Default: RMQ_SINKS, else ``sinks`` in the broker's home.
    root: str | None = None
    #: Maximum messages of a micro-batch, unless the run's config sets it. 0: RMQ_MICRO_BATCH, else
    #: as the consumer declares.
    micro_batch: int = 0

    def most(self) -> int:
        """Return the maximum messages of a micro-batch; 0: as the consumer declares."""
        return self.micro_batch or int(os.environ.get("RMQ_MICRO_BATCH") or 0)

    def folder(self, name: str | Path) -> Address:
        """Return the folder of a sink; an absolute path or a URI is unchanged."""
        return below(sinks_root(self.root), name)


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
    if not master:
        return settings()
    is_connect = master.startswith("sc://")
    return settings({"spark.remote" if is_connect else "spark.master": master})


def resources_of(deployment: str | None = None) -> dict[str, Any]:
    """Return the resources of a deployment; default: RMQ_DEPLOYMENT.

    Raises:
        ValueError: the deployment does not exist.
    """
    chosen = deployment or os.environ.get("RMQ_DEPLOYMENT", "local")
    if chosen not in DEPLOYMENTS:
        raise ValueError(f"RMQ_DEPLOYMENT is one of {', '.join(DEPLOYMENTS)}, not {chosen!r}")
    return production() if chosen == "production" else local()
