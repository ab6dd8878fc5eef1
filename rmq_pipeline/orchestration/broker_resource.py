"""The broker, as assets and sensors see it: a Flight client that connects and never starts one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import dagster as dg

from rmq_pipeline.flight.client import Client

#: A window outlives a restart of the broker that takes less than this.
RETRY_S: Final = 30.0


class BrokerResource(dg.ConfigurableResource["BrokerResource"]):
    """Where the broker answers.

    With nothing set, RMQ_FLIGHT and RMQ_HOME are read at run time, as every client does.
    """

    #: host:port of the table door.
    address: str | None = None
    #: A home on this machine; its endpoint file names the address and the token.
    home: str | None = None
    #: Shown to the broker; the endpoint file of a home has it, an address needs it given.
    token: str | None = None
    #: Who calls, where the broker has access control; RMQ_USER and RMQ_PASSWORD with nothing set.
    user: str | None = None
    password: str | None = None
    #: A file of certificates to trust, in PEM; the connection is encrypted then.
    certificate: str | None = None

    @contextmanager
    def client(self, *, retry_s: float = RETRY_S) -> Iterator[Client]:
        """A client for the length of a ``with`` block.

        Args:
            retry_s: how long verbs that may be repeated are, while no broker answers.
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
