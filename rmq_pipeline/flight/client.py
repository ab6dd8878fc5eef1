"""The client: the broker's verbs from another process, and sends in the background."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
from typing_extensions import override

from rmq_pipeline.errors import BrokerUnavailableError
from rmq_pipeline.flight import process
from rmq_pipeline.flight.connection import Connection, Target
from rmq_pipeline.flight.sender import Sender
from rmq_pipeline.flight.transactions import Producer, Transaction, transaction
from rmq_pipeline.transaction import Checker
from rmq_pipeline.verbs import Verbs


class Client(Verbs):
    """A connection to a broker. Thread-safe.

    While the broker is away, repeatable calls are repeated for up to ``retry_s``. Other calls raise
    BrokerUnavailableError, and may or may not have been carried out.
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
            address: host:port of its Flight endpoint, or grpc+tls://host:port. Default: the broker
                of ``home``, else RMQ_FLIGHT, else the broker of RMQ_HOME or of ``.rmq`` in the
                current project.
            autostart: start the broker of the home unless it is serving.
            token: refuse a broker start with another token. The token is stored in the home, and
                proves that the caller is the home's owner.
            user: the calling user, with its password, if the broker has access control. Default:
                RMQ_USER and RMQ_PASSWORD. A caller that finds the broker by its own home needs
                none.
            certificate: a PEM file of trusted certificates; the connection is then encrypted.
                Default: RMQ_CERTIFICATE.

        Raises:
            RequestError: a user without a password, or a password without a user.
            OSError: the certificate file cannot be read.
            OperatorError: the broker was started, and does not serve.
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
        """Send everything that ``send_async`` and ``send_one_way`` have queued, then disconnect.

        In the callback of a future, ``close`` returns at once, and the queue is sent in the
        background.
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

    @override
    def call(self, verb: str, args: Mapping[str, Any]) -> Any:
        """Call a verb by its name; retry for up to ``retry_s`` if repeating is safe.

        Raises:
            BrokerUnavailableError: no broker answers; a call that may not be repeated may or may
                not have been carried out.
            RocketMQError: the error that the broker raised.
        """
        return self._connection.call(verb, args)

    def transaction(
        self,
        topic: str,
        messages: pa.Table,
        *,
        producer_group: str,
        immunity_ms: int | None = None,
    ) -> AbstractContextManager[Transaction]:
        """Send half messages around local work, and commit them at the end of the block.

        ``rollback()`` in the block rolls them back. So does ``raise Rollback``, which leaves the
        block without an error. After any other exception, or the end of the process, the broker
        asks the checker. The local work may have taken effect, for example if a commit timed out.

        Raises:
            BrokerUnavailableError: the commit or rollback was not delivered; the checker decides.
        """
        return transaction(
            self,
            topic,
            messages=messages,
            producer_group=producer_group,
            immunity_ms=immunity_ms,
        )

    def producer(
        self, producer_group: str, *, checker: Checker, topics: Sequence[str] | None = None
    ) -> Producer:
        """Create a producer of transactions that answers its group's checks; close it first."""
        return Producer(self, producer_group, checker=checker, topics=topics)

    def send_async(self, topic: str, messages: pa.Table) -> "Future[pa.Table]":
        """Store messages in the background, in call order; the future has the result of ``send``.

        Blocks while 64 MiB are queued.

        Raises:
            BrokerUnavailableError: this client is closed.
        """
        future: Future[pa.Table] = Future()
        self._background().put(topic, messages, future=future)
        return future

    def send_one_way(self, topic: str, messages: pa.Table) -> None:
        """Store messages in the background; failures are only logged.

        Raises:
            BrokerUnavailableError: this client is closed.
        """
        self._background().put(topic, messages, future=None)

    def _background(self) -> Sender:
        with self._lock:
            if self._closed:
                raise BrokerUnavailableError("This client is closed.", remedy="Make a new client.")
            if self._sender is None:
                self._sender = Sender(self.send)
            return self._sender
