"""The broker's verbs for other processes: the same names, signatures and errors as in process."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

from rmq_pipeline.errors import BrokerUnavailableError
from rmq_pipeline.flight import process
from rmq_pipeline.flight.access import AccessControl
from rmq_pipeline.flight.administration import Administration
from rmq_pipeline.flight.archiving import Archiving
from rmq_pipeline.flight.connection import Connection
from rmq_pipeline.flight.consumers import Consumers
from rmq_pipeline.flight.failures import Failures
from rmq_pipeline.flight.lite_topics import LiteTopics
from rmq_pipeline.flight.messaging import Messaging
from rmq_pipeline.flight.producer import Producer
from rmq_pipeline.flight.redriving import Redriving
from rmq_pipeline.flight.sender import Sender
from rmq_pipeline.flight.sinks import Sinks
from rmq_pipeline.flight.target import Target
from rmq_pipeline.flight.transactions import Transactions
from rmq_pipeline.transaction import Checker


class Client(
    Administration,
    Archiving,
    Messaging,
    Consumers,
    LiteTopics,
    Redriving,
    Sinks,
    Transactions,
    Failures,
    AccessControl,
):
    """A connection to a broker, for any number of threads.

    Calls that may be repeated are, while the broker is away, for up to ``retry_s``; others raise
    BrokerUnavailableError, and may then have been carried out or not.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        home: Path | str | None = None,
        autostart: bool = False,
        token: str | None = None,
        user: str | None = None,
        password: str | None = None,
        certificate: Path | str | None = None,
        retry_s: float = 30.0,
    ) -> None:
        """Find the broker; the first call connects.

        Args:
            address: host:port of its table door, or grpc+tls://host:port; else the broker of
                ``home``, else RMQ_FLIGHT, else the broker of RMQ_HOME or of ``.rmq`` in the
                current project.
            autostart: start the broker of the home when none serves it.
            token: refuse another start of the broker than this one; found in the home, and says
                that this is the home's owner.
            user: who calls, with its password, where the broker has access control; else RMQ_USER
                and RMQ_PASSWORD. Who finds the broker by a home of its own needs none.
            certificate: a file of certificates to trust, in PEM; the connection is encrypted then.
                Else RMQ_CERTIFICATE.

        Raises:
            RequestError: a user without a password, or the other way round.
            OSError: the file of certificates cannot be read.
            OperatorError: the broker was to be started, and did not serve.
        """
        target = Target.find(
            address,
            home=home,
            token=token,
            user=user,
            password=password,
            certificate=certificate,
        )
        if autostart and target.home is not None:
            process.start(target.home)
        self._connection = Connection(target, retry_s=retry_s)
        self._sender: Sender | None = None
        self._closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """Send what ``send_async`` and ``send_one_way`` have queued, then disconnect.

        A future's callback does not wait for that; it is done in the background.
        """
        with self._lock:
            self._closed = True
        if self._sender is not None:
            self._sender.close(then=self._connection.close)
        else:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def producer(
        self, producer_group: str, *, checker: Checker, topics: Sequence[str] | None = None
    ) -> Producer:
        """A producer of transactions, which answers the checks of its group; close it first."""
        return Producer(self, producer_group, checker=checker, topics=topics)

    def send_async(self, topic: str, messages: pa.Table) -> "Future[pa.Table]":
        """Store messages in the background, in the order of the calls; what ``send`` returns.

        Waits only while 64 MiB are queued.

        Raises:
            BrokerUnavailableError: this client is closed.
        """
        future: Future[pa.Table] = Future()
        self._background().put(topic, messages, future=future)
        return future

    def send_one_way(self, topic: str, messages: pa.Table) -> None:
        """Store messages in the background; a failure is logged, and nobody told.

        Raises:
            BrokerUnavailableError: this client is closed.
        """
        self._background().put(topic, messages, future=None)

    def _background(self) -> Sender:
        with self._lock:
            if self._closed:
                raise BrokerUnavailableError("This client is closed.")
            if self._sender is None:
                self._sender = Sender(self.send)
            return self._sender
