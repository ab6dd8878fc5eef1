"""The broker as a Dagster resource: a Flight client that never starts a broker."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import dagster as dg

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
