"""Dagster resources: the broker as a Flight client, and the folder of the consumers' sinks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import dagster as dg

from rmq_pipeline.endpoint import default_home
from rmq_pipeline.flight.client import Client

#: Windows survive a restart of the broker that takes less than this.
RETRY_S: Final = 30.0


class BrokerResource(dg.ConfigurableResource["BrokerResource"]):
    """Address of the broker, and credentials.

    Without settings, RMQ_FLIGHT and RMQ_HOME are read at run time, as in every client.
    """

    #: host:port of the Flight endpoint.
    address: str | None = None
    #: A home on this machine; its endpoint file contains the address and the token.
    home: str | None = None
    #: Token sent to the broker; read from the endpoint file of a home, required with an address.
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
    """The parent folder of all sinks."""

    #: Default: RMQ_SINKS, else ``sinks`` in the broker's home.
    root: str | None = None
    #: Maximum messages of a micro-batch, unless the run's config sets it. 0: RMQ_MICRO_BATCH, else
    #: as the consumer declares.
    micro_batch: int = 0

    def most(self) -> int:
        """Return the maximum messages of a micro-batch; 0: as the consumer declares."""
        return self.micro_batch or int(os.environ.get("RMQ_MICRO_BATCH") or 0)

    def folder(self, name: Path) -> Path:
        """Return the folder of a sink; an absolute path is unchanged."""
        return sinks_root(self.root) / name


def sinks_root(root: str | None = None) -> Path:
    """Return the folder of all sinks: ``root``, else RMQ_SINKS, else ``sinks`` in the home."""
    named = root or os.environ.get("RMQ_SINKS")
    return Path(named) if named else default_home() / "sinks"
