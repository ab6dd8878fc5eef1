"""The gRPC service behind the Flight endpoint: limits, threads, headers, the end of a call.

It uses gRPC's own server. The server of pyarrow reads a message of any length into memory before
Python sees the headers of its call. This service checks the headers before it reads the first byte.
No message is longer than FLIGHT_MESSAGE_BYTES, and gRPC decompresses nothing.

The command of a call contains the length of its body. The broker reserves memory for the body
before it reads the first byte, or refuses the call.
"""

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Final, Generic, NoReturn, Protocol, TypeVar

import grpc
import pyarrow as pa

from rmq_pipeline import errors, limits
from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.clock import Deadline
from rmq_pipeline.errors import BusyError, MessageBodyTooLargeError, RequestError
from rmq_pipeline.flight import framing, wire
from rmq_pipeline.flight.tcp_stream import PORT_ACTION
from rmq_pipeline.flight.threads import Threads
from rmq_pipeline.limits import FlightLimits

#: Smaller calls are accepted even if other calls hold all memory.
_SMALL_BYTES: Final = 64 * 1024
#: While a caller is refused for lack of memory, other callers may hold at most one part in this
#: many.
_SHARE: Final = 2
#: A caller refused for lack of memory is expected to retry within this time.
_RETRY_S: Final = 10.0
#: A body that arrives at this rate may be read to its end, even while other callers are refused.
FAIR_BYTES_PER_S: Final = 16 * limits.MIB
#: Before this much time, the rate of a body counts as unknown.
_RATE_GRACE_S: Final = 2.0
#: Interval at which a call that waits for its body checks whether it must free its memory.
_LOOK_S: Final = 0.5


class Room:
    """Counts the bytes that calls hold, by caller. Thread-safe.

    A caller may hold all memory while no other caller needs it. When another caller is refused for
    lack of memory, callers with more than half of it lose their incomplete calls.
    """

    def __init__(self, allowed: FlightLimits) -> None:
        """Create an empty room; ``call_bytes`` and ``calls_bytes`` of the limits count."""
        self._call_bytes = allowed.call_bytes
        self._bytes = allowed.calls_bytes
        self._share = self._bytes // _SHARE
        self._lock = threading.Lock()
        self._held = 0
        self._by_caller: Counter[str] = Counter()
        #: Until this time on the monotonic clock, a caller with less than its share needs memory.
        self._wanted_until_s = 0.0

    @contextmanager
    def hold(self, size: int, *, caller: str, own: int = 0) -> Iterator[None]:
        """Reserve bytes for a call that already holds ``own`` bytes.

        Raises:
            MessageBodyTooLargeError: ``size`` exceeds the limit of one call.
            BusyError: all calls together hold too much, or this caller does.
        """
        if size > self._call_bytes:
            raise MessageBodyTooLargeError(
                f"The call has {size} bytes; the limit is {self._call_bytes}.",
                remedy="Send or settle fewer messages at a time.",
            )
        with self._lock:
            if own + size > _SMALL_BYTES:
                self._check_free(size, caller=caller, own=own)
            self._held += size
            self._by_caller[caller] += size
        try:
            yield
        finally:
            with self._lock:
                self._held -= size
                self._by_caller[caller] -= size
                if not self._by_caller[caller]:
                    del self._by_caller[caller]

    def check_share(self, caller: str, *, bytes_per_s: float = 0.0) -> None:
        """Refuse to read on for a caller that exceeds its share while another caller is refused.

        Args:
            caller: whose call it is.
            bytes_per_s: rate at which the body arrives; a fast body is soon over.

        Raises:
            BusyError: the caller exceeds its share.
        """
        with self._lock:
            is_slow = bytes_per_s < FAIR_BYTES_PER_S
            if is_slow and self._is_wanted() and self._by_caller[caller] > self._share:
                self._refuse_share(caller)

    def _check_free(self, size: int, *, caller: str, own: int) -> None:
        mine = self._by_caller[caller] + size
        if self._is_wanted() and mine > self._share:
            self._refuse_share(caller)
        if self._held > own and self._held + size > self._bytes:
            if mine <= self._share:
                self._wanted_until_s = time.monotonic() + _RETRY_S
            raise BusyError(
                f"Calls under way hold {self._held} bytes, and {self._bytes} are"
                " the limit: try again in a moment, or send less at a time."
            )

    def _is_wanted(self) -> bool:
        return time.monotonic() < self._wanted_until_s

    def _refuse_share(self, caller: str) -> None:
        raise BusyError(
            f"Your calls hold {self._by_caller[caller]} bytes, and another caller is refused for"
            " lack of memory. Until it has memory, the limit for one caller is"
            f" {self._share} bytes.",
            remedy="Try again in a moment, or send less at a time.",
        )


class Said(Protocol):
    """The messages of a call."""

    @property
    def messages(self) -> Iterator[framing.Message]:
        """Iterate over the messages; each is read on demand."""
        ...

    def read(self, timeout_s: float) -> framing.Message | None:
        """Return the next message, or None at the end.

        Raises:
            TimeoutError: none arrived within ``timeout_s``; the next ``read`` may return it.
        """
        ...


class Intake:
    """Reads the command and the body of one call, message by message."""

    def __init__(self, call: Said, *, silent_s: float) -> None:
        """Create the reader; nothing is read yet.

        Args:
            call: its messages are read.
            silent_s: the body is refused if nothing arrives for this long.
        """
        self._silent_s = silent_s
        self._call = call
        self._slices: list[memoryview] = []
        self._read = 0
        self._size: int | None = None
        self._began_s = time.monotonic()

    @property
    def is_over(self) -> bool:
        """True if the whole call was read, so that the caller waits for an answer."""
        return self._read == self._size

    def command(self) -> bytes:
        """Read the first message, and return the command of the call.

        Raises:
            RequestError: the message has no command.
        """
        message = next(self._call.messages, None)
        if message is None or message.command is None:
            raise RequestError("The call has no command: its first message begins with one.")
        if message.data:
            self._slices.append(message.data)
            self._read = message.data.nbytes
        return message.command

    def expect(self, size: int) -> None:
        """Set the length of the body, as given in the command.

        Raises:
            RequestError: the bytes read so far are longer.
        """
        self._size = size
        self._check(self._read)

    def body(self, check: Callable[[float], None] = lambda _: None) -> pa.Buffer:
        """Read the rest, and return the body of the call.

        Args:
            check: called twice a second, and for each message, with the bytes that arrive a
                second; may raise to end the call.

        Raises:
            RequestError: the body is longer or shorter than expected, or the caller stops sending.
        """
        size = self._size or 0
        while self._read < size and not self._slices:
            self._read_more(size, check)
        if self._read == size and len(self._slices) < 2:
            return pa.py_buffer(self._slices.pop() if self._slices else b"")
        buffer = pa.allocate_buffer(size)
        whole, at = memoryview(buffer).cast("B"), 0
        while True:
            for data in self._slices:
                whole[at : at + data.nbytes] = data
                at += data.nbytes
            self._slices.clear()
            if self._read == size:
                return buffer
            self._read_more(size, check)

    def _read_more(self, size: int, check: Callable[[float], None]) -> None:
        data = self._next(size, check)
        self._check(self._read + data.nbytes)
        self._slices.append(data)
        self._read += data.nbytes

    def _next(self, size: int, check: Callable[[float], None]) -> memoryview:
        """Wait for the next bytes of the body."""
        silence = Deadline(self._silent_s)
        while not silence.is_over:
            check(self._rate())
            try:
                message = self._call.read(min(_LOOK_S, self._silent_s))
            except TimeoutError:
                continue
            if message is None:
                raise RequestError(
                    f"The call ended after {self._read} of the {size} bytes of its body."
                )
            if message.data:
                return message.data
        raise RequestError(
            f"The call has sent {self._read} of the {size} bytes of its body, and then nothing for"
            f" {self._silent_s:g} s, while other calls wait for its memory.",
            remedy="Call again.",
        )

    def _rate(self) -> float:
        """Return the bytes that have arrived a second; infinite during the first moments."""
        elapsed_s = time.monotonic() - self._began_s
        # A caller that announces much and sends nothing gets no more than one look.
        grace_s = _RATE_GRACE_S if self._read else _LOOK_S
        return self._read / elapsed_s if elapsed_s > grace_s else math.inf

    def _check(self, read: int) -> None:
        if self._size is not None and read > self._size:
            raise RequestError(
                f"The call sends more than the {self._size} bytes that its command says."
            )


class UnsupportedError(errors.RequestError):
    """The endpoint does not have this operation."""


class CancelledError(errors.RequestError):
    """Another call has cancelled the query."""

    remedy = "Ask for a new ticket to run the query again."


log = logging.getLogger(__name__)

_SERVICE: Final = "arrow.flight.protocol.FlightService"
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", limits.FLIGHT_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # Allow no compression: a message would be decompressed before its length is known.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Pings of the server detect a client whose machine has disappeared.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # By default gRPC measures the delay of a connection with a ping whenever data arrives. The
    # lookahead is data received before the call is checked, so it is small.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 256 * 1024),
    ("grpc.http2.max_frame_size", 256 * 1024),
    # Otherwise two brokers could listen on one port, and share its calls.
    ("grpc.so_reuseport", 0),
    # Close a connection without a handshake; the default is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
)
#: Running calls get this long to finish when the endpoint closes.
_GRACE_S: Final = 60.0
#: Status codes of refusals, for foreign clients; others are FAILED_PRECONDITION.
_CODES: Final = (
    (errors.UnauthorizedError, grpc.StatusCode.UNAUTHENTICATED),
    (errors.ForbiddenError, grpc.StatusCode.PERMISSION_DENIED),
    (errors.BrokerUnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.BusyError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
    (UnsupportedError, grpc.StatusCode.UNIMPLEMENTED),
    (CancelledError, grpc.StatusCode.CANCELLED),
    (errors.RequestError, grpc.StatusCode.INVALID_ARGUMENT),
)


def _options(calls: int) -> tuple[tuple[str, int], ...]:
    # By default gRPC cancels calls at random once a thousand wait for a thread.
    return (
        *_OPTIONS,
        ("grpc.server.max_pending_requests", calls),
        ("grpc.server.max_pending_requests_hard_limit", calls + 1),
    )


class Caller(Protocol):
    """The caller of a call, as seen by an endpoint."""

    @property
    def headers(self) -> dict[str, str]:
        """Metadata of the call, received before the first message; names in lower case."""
        ...

    @property
    def peer(self) -> str:
        """Address of the caller, as gRPC names it."""
        ...

    def is_active(self) -> bool:
        """Return True while the caller is connected."""
        ...


class Call(Said, Caller, Protocol):
    """A call of this library's client."""

    @property
    def is_action(self) -> bool:
        """True if the call has one message and gets one answer."""
        ...


class SqlCall(Caller, Protocol):
    """A call of a foreign client."""

    def read(self, timeout_s: float) -> bytes | None:
        """Return the next message, or None at the end.

        Raises:
            TimeoutError: none arrived within ``timeout_s``.
        """
        ...


class Sql(Protocol):
    """The calls of Flight SQL, by Flight's methods; each yields its messages."""

    def info(self, call: SqlCall) -> Iterator[bytes]:
        """Answer GetFlightInfo."""
        ...

    def schema(self, call: SqlCall) -> Iterator[bytes]:
        """Answer GetSchema."""
        ...

    def get(self, call: SqlCall) -> Iterator[bytes]:
        """Answer DoGet."""
        ...

    def put(self, call: SqlCall) -> Iterator[bytes]:
        """Answer DoPut."""
        ...

    def act(self, call: Caller, action: framing.ForeignAction) -> bytes:
        """Return the answer to an action."""
        ...


_Message = TypeVar("_Message")


class _Call(Generic[_Message]):
    """A call received by gRPC."""

    def __init__(
        self,
        messages: Iterator[_Message],
        context: grpc.ServicerContext,
        *,
        threads: Threads,
        is_action: bool,
    ) -> None:
        self.headers = _headers(context)
        self.messages = messages
        self._threads = threads
        #: The message that a thread waits for, because gRPC offers no wait with a time limit.
        self._coming: Future[_Message | None] | None = None
        self.is_action = is_action
        self.peer: str = context.peer()
        self.is_active: Callable[[], bool] = context.is_active

    def read(self, timeout_s: float) -> _Message | None:
        self._coming = self._coming or self._threads.submit(next, self.messages, None)
        message = self._coming.result(timeout_s)
        self._coming = None
        return message


def _headers(context: grpc.ServicerContext) -> dict[str, str]:
    found = context.invocation_metadata() or ()
    return {key: value for key, value in found if isinstance(value, str)}


Exchange = Callable[[Call], Iterator[bytes]]
SignIn = Callable[[str | None], str]


class Service:
    """A gRPC server with Flight's methods, except for its lists."""

    def __init__(
        self,
        address: str,
        *,
        exchange: Exchange,
        sign_in: SignIn,
        sql: Sql,
        announce: Callable[[Caller], bytes],
        certificate: Certificate | None,
        calls: int = FlightLimits().calls,
    ) -> None:
        """Listen.

        Args:
            address: host:port; port 0 chooses a free port.
            exchange: yields the answers to a call, or raises its refusal.
            sign_in: returns the token for an ``authorization``, or raises the refusal of a
                handshake.
            sql: answers foreign clients.
            announce: answers ``PORT_ACTION``, or raises the refusal of a caller.
            certificate: encrypts connections.
            calls: number of calls under way at most.

        Raises:
            RequestError: the address is in use.
        """
        self._exchange = exchange
        self._sign_in = sign_in
        self._sql = sql
        self._announce = announce
        self._threads = Threads()
        self._server = grpc.server(
            self._threads, options=_options(calls), maximum_concurrent_rpcs=calls
        )
        handlers = {
            "DoExchange": grpc.stream_stream_rpc_method_handler(self._exchanged),
            # Its one message is read as a stream, so the headers are checked first. Its one answer
            # is sent with the end of the call.
            "DoAction": grpc.stream_unary_rpc_method_handler(self._acted),
            "Handshake": grpc.stream_stream_rpc_method_handler(self._greeted),
            # Their requests are read as streams, too.
            "GetFlightInfo": self._foreign(sql.info),
            "GetSchema": self._foreign(sql.schema),
            "DoGet": self._foreign(sql.get),
            "DoPut": self._foreign(sql.put),
        }
        self._server.add_registered_method_handlers(_SERVICE, handlers)
        try:
            if certificate is None:
                self.port: int = self._server.add_insecure_port(address)
            else:
                keys = grpc.ssl_server_credentials([(certificate.key, certificate.chain)])
                self.port = self._server.add_secure_port(address, keys)
        except RuntimeError as error:
            raise errors.RequestError(f"The broker cannot listen at {address}.") from error
        self._server.start()

    def shutdown(self) -> None:
        """Accept no new calls, wait for running ones, stop listening."""
        self._server.stop(_GRACE_S).wait()
        # gRPC counts a call as finished when its caller has gone, while the broker still works on
        # it.
        self._threads.wait(_GRACE_S)

    def _exchanged(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        said = _read(messages, framing.read_message)
        call = _Call(said, context, threads=self._threads, is_action=False)
        try:
            for answer in self._exchange(call):
                yield framing.write_message(answer)
        except errors.RocketMQError as error:
            _refuse(context, error, said=wire.refusal_status(error))

    def _acted(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        said = _read(itertools.islice(messages, 1), framing.read_action)
        call = _Call(said, context, threads=self._threads, is_action=True)
        try:
            (answer,) = self._exchange(call)
        except framing.ForeignAction as action:
            answer = self._acted_foreign(call, action, context=context)
        except errors.RocketMQError as error:
            _refuse(context, error, said=wire.refusal_status(error))
        return framing.write_result(answer)

    def _acted_foreign(
        self, call: Caller, action: framing.ForeignAction, *, context: grpc.ServicerContext
    ) -> bytes:
        with _refusing(context):
            if action.kind == PORT_ACTION:
                return self._announce(call)
            return self._sql.act(call, action)

    def _foreign(self, answers: Callable[[SqlCall], Iterator[bytes]]) -> grpc.RpcMethodHandler:
        def answer(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            call = _Call(_read(messages, bytes), context, threads=self._threads, is_action=False)
            with _refusing(context):
                yield from answers(call)

        return grpc.stream_stream_rpc_method_handler(answer)

    def _greeted(self, _: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Return a token to a Flight client, in a header; headers carry both request and answer."""
        try:
            token = self._sign_in(_headers(context).get("authorization"))
        except errors.UnauthorizedError as error:
            _refuse(context, error, said=str(error))
        context.send_initial_metadata((("authorization", f"Bearer {token}"),))
        return iter(())


def _read(messages: Iterator[bytes], decode: Callable[[bytes], _Message]) -> Iterator[_Message]:
    """Yield the messages of a call.

    Raises:
        RequestError: the caller has gone. gRPC keeps its own error alive. That error would keep the
            reading frames and their data until the next garbage collection.
    """
    while True:
        try:
            message = next(messages, None)
        except grpc.RpcError:
            break
        if message is None:
            return
        yield decode(message)
    raise errors.RequestError("The caller has gone before the call was complete.")


@contextmanager
def _refusing(context: grpc.ServicerContext) -> Iterator[None]:
    """End a call of a foreign client with the status of the error that the block raises."""
    try:
        yield
    except errors.RocketMQError as error:
        _refuse(context, error, said=wire.short(error))
    except Exception as error:
        log.exception("a call of Flight SQL failed")
        failed = errors.RocketMQError(f"The call failed: {type(error).__name__}: {error}.")
        _refuse(context, failed, said=wire.short(failed))


def _refuse(context: grpc.ServicerContext, error: errors.RocketMQError, *, said: str) -> NoReturn:
    """End a call with a status, which the client receives even while it writes."""
    found = (code for kind, code in _CODES if isinstance(error, kind))
    context.abort(next(found, grpc.StatusCode.FAILED_PRECONDITION), said)
    raise AssertionError("abort raises")
