"""A channel to one broker: how its calls travel.

Calls are actions or exchanges of Flight. Once a channel has made some small calls, it asks the
broker for the port of plain connections, and small calls take those: a call costs a third less
there. Where that port cannot be reached, everything goes on through Flight.
"""

import logging
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakSet

import pyarrow as pa
from pyarrow import flight

from rmq_pipeline import errors, limits
from rmq_pipeline.flight import framing, wire
from rmq_pipeline.flight.tcp_client import NoTcpError, TcpClient
from rmq_pipeline.flight.tcp_stream import KEY_BYTES, LENGTH, PORT_ACTION

log = logging.getLogger(__name__)

#: A call counts as lost after this long without an answer, in addition to its own waiting time.
ANSWER_S: Final = 300.0
#: Small calls of a channel before it asks for plain connections: a command makes fewer.
SMALL_CALLS: Final = 8
#: A channel whose broker took no plain connection asks again after this time.
ASK_AGAIN_S: Final = 60.0
#: Longest wait for the answer to that, and to a sign of life.
PROBE_S: Final = 2.0
#: Text of gRPC's error if it could not even connect.
_NO_CONNECTION: Final = "failed to connect to all addresses"

# Every client has connections of its own and does not wait for the backoff of another client. A
# broker that comes back is therefore found at once.
_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
)
#: With several addresses: a machine that is gone closes no connection, so ask for signs of life.
_WATCHED: Final = (
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 1_500),
    # Otherwise a ping waits a minute for its answer.
    ("grpc.http2.ping_timeout_ms", 1_500),
    ("grpc.http2.max_pings_without_data", 0),
)


#: Answers of a broker that does not lead its log, or does so no more.
NOT_LEADING: Final = (errors.StandbyError, errors.LogFencedError)


class LostConnectionError(Exception):
    """The call has no answer; it may or may not have been sent."""

    @property
    def was_sent(self) -> bool:
        """Return False if the call was surely not sent."""
        return _NO_CONNECTION not in str(self)


class SilentBrokerError(LostConnectionError):
    """The call was sent, and the broker stands still or leads no more."""


@dataclass(frozen=True)
class Place:
    """Address of a broker, and how to connect."""

    #: host:port.
    address: str
    token: str | None = field(repr=False)
    encrypted: bool = False
    #: Trusted certificates in PEM; None: those of the system.
    trusted: bytes | None = field(default=None, repr=False)
    #: Name that the certificate must have; None: the host of the address.
    server_name: str | None = None


class Channel:
    """Calls one broker. Thread-safe."""

    def __init__(
        self, place: Place, *, headers: Mapping[str, str], is_watched: bool = False
    ) -> None:
        """Connect on the first call.

        Args:
            place: where the broker is.
            headers: of every call, in addition to the token of the place.
            is_watched: notice a machine that is gone.
        """
        self._place = place
        self._named = {**headers, wire.TOKEN: place.token} if place.token else dict(headers)
        self._headers = [(name.encode(), text.encode()) for name, text in self._named.items()]
        self._client = _client(place, options=[*_OPTIONS, *(_WATCHED if is_watched else ())])
        self._is_watched = is_watched
        self._lock = threading.Lock()
        #: Calls of Flight that may take long.
        self._running: set[flight.FlightStreamReader] = set()
        self._small_calls = 0
        self._tcp: TcpClient | None = None
        #: All whose calls may still run.
        self._tcps: WeakSet[TcpClient] = WeakSet()
        #: Time of the monotonic clock before which the broker is not asked for its port.
        self._ask_from_s = 0.0
        self._closed = False

    def call(self, request: wire.Request, parts: Sequence[framing.Part]) -> Any:
        """Make a call.

        Raises:
            LostConnectionError: it has no answer.
            RocketMQError: the error that the broker raised.
        """
        command = request.command(parts)
        timeout_s = ANSWER_S + _waits_s(request.args)
        size = sum(data.size for _, data in parts)
        tcp = self._tcp_for(command, size)
        if tcp is not None:
            try:
                answer = tcp.call(command, parts, timeout_s=timeout_s, is_quick=request.verb.quick)
                return wire.read_answer(answer) if answer else _no_answer()
            except NoTcpError as error:
                log.info("calls go through Flight for now: %s", error)
                self._leave(tcp)
            except (OSError, EOFError) as error:
                raise LostConnectionError(f"The plain connection was lost: {error}") from error
        options = flight.FlightCallOptions(timeout=timeout_s, headers=self._headers)
        try:
            if request.verb.quick and len(command) + size <= limits.FLIGHT_SLICE_BYTES:
                answer = self._act(framing.CALL, framing.action(command, parts), options=options)
            else:
                answer = self._exchange(command, parts=parts, options=options)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            wire.check_status(str(error))
            raise LostConnectionError(str(error)) from error
        if not answer or any(data is None for data in answer):
            _no_answer()
        return wire.read_answer(answer)

    def probe(self, *, timeout_s: float = ANSWER_S) -> None:
        """Ask the broker for a sign of life.

        Args:
            timeout_s: a watched channel notices a broker that stands still long before.

        Raises:
            LostConnectionError: it does not answer.
            StandbyError: it is a standby.
        """
        request = wire.request("ping", {})
        options = flight.FlightCallOptions(timeout=timeout_s, headers=self._headers)
        body = framing.action(request.command(), ())
        try:
            answer = self._act(framing.CALL, body, options=options)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            wire.check_status(str(error))
            raise LostConnectionError(str(error)) from error
        wire.read_answer(answer)

    def _ask(self) -> None:
        """Ask for a sign of life on behalf of a call under way, which may have been carried out.

        Raises:
            SilentBrokerError: the broker does not answer, or leads no more.
        """
        try:
            self.probe()
        except (*NOT_LEADING, LostConnectionError, errors.BrokerUnavailableError) as error:
            raise SilentBrokerError(f"The broker does not lead any more: {error}") from error
        except errors.RocketMQError as error:
            log.debug("the broker lives: %s", error)

    def close(self) -> None:
        """Cancel calls that may take long; quick ones finish."""
        with self._lock:
            # Closing the client would crash the process if another thread were just beginning a
            # call. It disconnects when the last call releases this channel.
            self._closed = True
            running = list(self._running)
            tcps = list(self._tcps)
        for reader in running:
            reader.cancel()
        for tcp in tcps:
            tcp.close()

    def _act(self, kind: str, body: bytes, *, options: flight.FlightCallOptions) -> list[pa.Buffer]:
        action = flight.Action(kind, body)
        return [result.body for result in self._client.do_action(action, options)]

    def _exchange(
        self,
        command: bytes,
        *,
        parts: Sequence[framing.Part],
        options: flight.FlightCallOptions,
    ) -> list[pa.Buffer]:
        """Make one round trip; return the messages of the answer."""
        descriptor = flight.FlightDescriptor.for_command(command)
        writer, reader = self._client.do_exchange(descriptor, options)
        with self._watched(reader), writer:
            # A refused call ends before everything is written; the read below then gets the reason.
            with suppress(flight.FlightError, pa.ArrowException, OSError):
                for data in framing.body(parts):
                    writer.write_metadata(data)
                writer.done_writing()
            found = []
            with suppress(StopIteration):
                while True:
                    found.append(reader.read_chunk().app_metadata)
        return found

    @contextmanager
    def _watched(self, reader: flight.FlightStreamReader) -> Iterator[None]:
        """Register a call, so that ``close`` can cancel it."""
        with self._lock:
            self._running.add(reader)
            is_late = self._closed
        try:
            if is_late:
                reader.cancel()
            yield
        finally:
            with self._lock:
                self._running.discard(reader)

    def _tcp_for(self, command: bytes, body_bytes: int) -> TcpClient | None:
        """Return the plain connections if the call may take one."""
        tcp = self._tcp
        if tcp is None and self._may_ask():
            tcp = self._found_tcp()
            with self._lock:
                self._tcp = tcp
                if tcp is not None:
                    self._tcps.add(tcp)
                    if self._closed:
                        tcp.close()
        return tcp if tcp is not None and tcp.takes(command, body_bytes) else None

    def _may_ask(self) -> bool:
        """Return True, to one thread, if it is time to ask for the port of plain connections."""
        with self._lock:
            self._small_calls += 1
            now_s = time.monotonic()
            if self._small_calls < SMALL_CALLS or now_s < self._ask_from_s:
                return False
            self._ask_from_s = now_s + ASK_AGAIN_S
            return True

    def _leave(self, tcp: TcpClient) -> None:
        """Use these plain connections for no other call."""
        with self._lock:
            if self._tcp is tcp:
                self._tcp = None
                self._ask_from_s = time.monotonic() + ASK_AGAIN_S

    def _found_tcp(self) -> TcpClient | None:
        """Ask the broker for the port of plain connections; None if it has none."""
        options = flight.FlightCallOptions(timeout=PROBE_S, headers=self._headers)
        try:
            (answer,) = self._act(PORT_ACTION, b"", options=options)
            told = answer.to_pybytes()
            if len(told) != LENGTH.size + KEY_BYTES:
                return None
            encryption = self._encryption()
        except (flight.FlightError, pa.ArrowException, OSError, ValueError) as error:
            log.info("the broker names no port of plain connections: %s", error)
            return None
        host, _, _ = self._place.address.rpartition(":")
        return TcpClient(
            host,
            LENGTH.unpack(told[: LENGTH.size])[0],
            key=told[LENGTH.size :],
            headers=self._named,
            encryption=encryption,
            server_name=self._place.server_name,
            ask=self._ask if self._is_watched else None,
        )

    def _encryption(self) -> ssl.SSLContext | None:
        if not self._place.encrypted:
            return None
        trusted = self._place.trusted
        # Comments between certificates may have any letters.
        return ssl.create_default_context(
            cadata=None if trusted is None else trusted.decode("ascii", "ignore")
        )


def _client(place: Place, *, options: Sequence[tuple[str, int]]) -> flight.FlightClient:
    if not place.encrypted:
        return flight.FlightClient(f"grpc://{place.address}", generic_options=options)
    return flight.FlightClient(
        f"grpc+tls://{place.address}",
        generic_options=options,
        tls_root_certs=place.trusted,
        override_hostname=place.server_name,
    )


def _no_answer() -> None:
    raise LostConnectionError("The call ended without an answer.")


def _waits_s(args: Mapping[str, Any]) -> float:
    """Return the waiting time of a call in seconds; the broker refuses invalid values."""
    wait_ms, timeout_s = args.get("wait_ms"), args.get("timeout_s")
    found = 0.0
    if isinstance(wait_ms, int | float) and 0 <= wait_ms <= limits.POLL_MAX_MS:
        found += wait_ms / 1000
    if isinstance(timeout_s, int | float) and 0 <= timeout_s <= limits.QUERY_TIMEOUT_MAX_S:
        found += timeout_s
    return found
