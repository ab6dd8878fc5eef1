"""The client: the broker's verbs from another process, and sends in the background."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
from typing_extensions import override

from rmq_pipeline import limits, tracing
from rmq_pipeline.errors import BrokerUnavailableError, RequestError
from rmq_pipeline.flight import process, wire
from rmq_pipeline.flight.connection import Connection, Target
from rmq_pipeline.flight.transactions import Producer, Transaction, transaction
from rmq_pipeline.transaction import Checker
from rmq_pipeline.verbs import Verbs

log = logging.getLogger(__name__)

#: Limits of one call; a single larger table is still sent.
CALL_BYTES = 8 * limits.MIB
CALL_ROWS = 20_000
#: ``put`` blocks while more than this is queued.
WAITING_BYTES = 64 * limits.MIB

Send = Callable[[str, pa.Table], pa.Table]


@dataclass(frozen=True)
class _Waiting:
    topic: str
    messages: pa.Table
    future: "Future[pa.Table] | None"
    bytes: int


class Sender:
    """Thread that sends tables in the order of ``put``; tables queued during a call share one."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._queue: deque[_Waiting] = deque()
        self._bytes = 0
        self._closing = False
        self._then: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="rmq-sender", daemon=True)
        self._thread.start()

    def put(self, topic: str, messages: pa.Table, *, future: "Future[pa.Table] | None") -> None:
        """Queue a table; block while WAITING_BYTES are queued. Without a future, log failures.

        The callback of a future runs in the sending thread, so there ``put`` does not block.
        """
        messages = wire.as_table("messages", messages)
        waiting = _Waiting(topic, messages, future, messages.nbytes)
        with self._changed:
            if not self._is_here():
                self._changed.wait_for(lambda: self._bytes < WAITING_BYTES or self._closing)
            if self._closing:
                raise BrokerUnavailableError("This client is closed.", remedy="Make a new client.")
            self._queue.append(waiting)
            self._bytes += waiting.bytes
            self._changed.notify_all()

    def close(self, then: Callable[[], None] = lambda: None) -> None:
        """Send all queued tables, then call ``then`` and end the thread.

        The callback of a future runs in the sending thread, so there ``close`` does not block.
        """
        with self._changed:
            self._closing = True
            if self._is_here():
                self._then = then
            self._changed.notify_all()
        if not self._is_here():
            self._thread.join()
            then()

    def _is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        while neighbours := self._take():
            if wanted := [waiting for waiting in neighbours if _begin(waiting)]:
                self._deliver(wanted)
        self._then()

    def _take(self) -> list[_Waiting]:
        """Return the first tables that can share a call; none if the sender is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or self._closing)
            taken: list[_Waiting] = []
            size = rows = 0
            while self._queue:
                next_ = self._queue[0]
                size, rows = size + next_.bytes, rows + next_.messages.num_rows
                if taken and not (
                    size <= CALL_BYTES and rows <= CALL_ROWS and _go_together(taken[0], next_)
                ):
                    break
                taken.append(self._queue.popleft())
            self._bytes -= sum(waiting.bytes for waiting in taken)
            self._changed.notify_all()
        return taken

    def _deliver(self, together: list[_Waiting]) -> None:
        try:
            sent = self._send(together[0].topic, pa.concat_tables([w.messages for w in together]))
        except RequestError as error:
            # The request was refused as a whole and nothing is stored. Sent singly, only the faulty
            # table is refused.
            if len(together) == 1:
                _fail(together[0], error)
            for waiting in together if len(together) > 1 else ():
                self._deliver([waiting])
        except Exception as error:  # noqa: BLE001 - the error belongs to the futures
            for waiting in together:
                _fail(waiting, error)
        else:
            row = 0
            for waiting in together:
                if waiting.future is not None:
                    waiting.future.set_result(sent.slice(row, waiting.messages.num_rows))
                row += waiting.messages.num_rows


def _begin(waiting: _Waiting) -> bool:
    """Return False if the future was cancelled; otherwise it cannot be cancelled any more."""
    return waiting.future is None or waiting.future.set_running_or_notify_cancel()


def _go_together(first: _Waiting, other: _Waiting) -> bool:
    return first.topic == other.topic and first.messages.schema.equals(other.messages.schema)


def _fail(waiting: _Waiting, error: Exception) -> None:
    if waiting.future is not None:
        waiting.future.set_exception(error)
    else:
        log.warning("one-way send to %s failed: %s", waiting.topic, error)


class Client(Verbs):
    """A connection to a broker. Thread-safe.

    While the broker is away, repeatable calls are repeated for up to ``retry_s``. Other calls raise
    BrokerUnavailableError, and may or may not have been carried out. With several addresses, every
    call waits for up to ``retry_s`` until one of the brokers leads.
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
        anonymous: bool = False,
    ) -> None:
        """Find the broker; the first call connects.

        Args:
            address: host:port of its Flight endpoint, or grpc+tls://host:port. A leader and its
                standbys are separated by commas: the client finds the one that leads. Default: the
                broker of ``home``, else RMQ_FLIGHT, else the broker of RMQ_HOME or of ``.rmq`` in
                the current project.
            autostart: start the broker of the home unless it is serving.
            token: refuse a broker start with another token. The token is stored in the home, and
                proves that the caller is the home's owner.
            user: the calling user, with its password, if the broker has access control. Default:
                RMQ_USER and RMQ_PASSWORD. A caller that finds the broker by its own home needs
                none.
            certificate: a PEM file of trusted certificates; the connection is then encrypted.
                Default: RMQ_CERTIFICATE.
            retry_s: time for which repeatable calls are repeated while the broker is away.
            anonymous: do not use the token of the home, RMQ_USER and RMQ_PASSWORD. Without a user,
                a broker with access control then refuses the calls.

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
            anonymous=anonymous,
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

    @override
    def send(self, topic: str, messages: pa.Table) -> pa.Table:
        """Store messages, all or none; see ``Verbs.send``. In a traced program it has a span."""
        span, carrying = tracing.begin_send(topic, messages)
        with span:
            return self._send(topic, carrying)

    def _send(self, topic: str, messages: pa.Table) -> pa.Table:
        """Store messages that have a span already."""
        return super().send(topic, messages)

    @override
    def send_half(
        self,
        topic: str,
        messages: pa.Table,
        *,
        producer_group: str,
        immunity_ms: int | None = None,
    ) -> pa.Table:
        """Store half messages; see ``Verbs.send_half``. In a traced program it has a span."""
        span, carrying = tracing.begin_send(topic, messages)
        with span:
            return super().send_half(
                topic, carrying, producer_group=producer_group, immunity_ms=immunity_ms
            )

    def send_async(self, topic: str, messages: pa.Table) -> "Future[pa.Table]":
        """Store messages in the background, in call order; the future has the result of ``send``.

        Blocks while 64 MiB are queued.

        Raises:
            BrokerUnavailableError: this client is closed.
        """
        future: Future[pa.Table] = Future()
        # Begun here: the sending thread has another current span.
        span, carrying = tracing.begin_send(topic, messages)
        future.add_done_callback(span.end_with)
        try:
            self._background().put(topic, carrying, future=future)
        except BaseException as error:
            span.ended_by(error)
            raise
        return future

    def send_one_way(self, topic: str, messages: pa.Table) -> None:
        """Store messages in the background; failures are only logged.

        Raises:
            BrokerUnavailableError: this client is closed.
        """
        span, carrying = tracing.begin_send(topic, messages)
        with span:
            self._background().put(topic, carrying, future=None)

    def _background(self) -> Sender:
        with self._lock:
            if self._closed:
                raise BrokerUnavailableError("This client is closed.", remedy="Make a new client.")
            if self._sender is None:
                self._sender = Sender(self._send)
            return self._sender
