"""A connection to the Flight endpoint: finds the broker, makes calls, reconnects."""

import logging
import os
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

from rmq_pipeline import errors, limits
from rmq_pipeline.access import credentials
from rmq_pipeline.clock import Deadline
from rmq_pipeline.endpoint import Endpoint, default_home, stamp
from rmq_pipeline.flight import framing, wire
from rmq_pipeline.verb import Verb

log = logging.getLogger(__name__)

ENCRYPTED: Final = "grpc+tls://"
#: Other prefixes of an address.
_PLAIN: Final = ("grpc://", "grpc+tcp://")
#: Addresses for all interfaces, and the loopback address that reaches them.
_ITSELF: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - nothing listens here


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


@dataclass(frozen=True)
class Target:
    """How to find the broker: fixed addresses, or the endpoint file of a home."""

    #: host:port; of a leader and its standbys, separated by commas.
    address: str | None = None
    home: Path | None = None
    token: str | None = field(default=None, repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    encrypted: bool = False
    #: File of trusted certificates.
    certificate: Path | None = None
    #: Never send the token of the home: access control then applies to this caller, too.
    anonymous: bool = False

    @classmethod
    def find(
        cls,
        address: str | None,
        *,
        home: Path | str | None,
        token: str | None,
        user: str | None = None,
        password: str | None = None,
        certificate: Path | str | None = None,
        anonymous: bool = False,
    ) -> "Target":
        """Combine the arguments with the environment; without both, use the default home.

        RMQ_FLIGHT has one address or several. RMQ_USER, RMQ_PASSWORD and RMQ_CERTIFICATE are the
        other variables. An anonymous target has no token of the home, and no user of the
        environment.

        Raises:
            RequestError: a user without a password, or a password without a user. Or the addresses
                are malformed, or go with a token.
        """
        address = address or (None if home else os.environ.get("RMQ_FLIGHT"))
        if user is None and password is None and not anonymous:
            user, password = os.environ.get("RMQ_USER"), os.environ.get("RMQ_PASSWORD")
        if bool(user) != bool(password):
            raise errors.RequestError("A user and a password go together.")
        trusted = certificate or os.environ.get("RMQ_CERTIFICATE") or None
        if not address:
            where = Path(home) if home else default_home()
            return cls(None, where, token, user or None, password or None, anonymous=anonymous)
        addresses = addresses_of(address)
        if token and len(addresses) > 1:
            raise errors.RequestError(
                "A token is that of one start of one broker; it cannot go with several addresses.",
                remedy="Leave the token out, and give a user and a password if the brokers have"
                " users.",
            )
        return cls(
            ",".join(addresses),
            None,
            token,
            user or None,
            password or None,
            encrypted=ENCRYPTED in address or trusted is not None,
            certificate=Path(trusted) if trusted else None,
        )

    def authorization(self) -> str | None:
        """Return the header with the credentials; None without a user."""
        if self.user is None or self.password is None:
            return None
        return credentials.basic(self.user, self.password)

    def addresses(self) -> list[str]:
        """Return the fixed addresses; none if the home says where its broker is."""
        return self.address.split(",") if self.address else []

    def locate(self, address: str | None = None) -> Place:
        """Return the address and the token to send.

        Args:
            address: one of ``addresses``; None: the only one, or that of the home's broker.

        Raises:
            BrokerUnavailableError: the home has no running broker.
            OSError: the certificate file cannot be read.
        """
        if self.address:
            trusted = self.certificate.read_bytes() if self.certificate else None
            return Place(address or self.address, self.token, self.encrypted, trusted)
        assert self.home is not None
        endpoint = Endpoint.read(self.home)
        if endpoint is None or not endpoint.is_alive():
            raise errors.BrokerUnavailableError(f"No broker serves {self.home}.")
        place = place_of(endpoint, token=self.token)
        return replace(place, token=None) if self.anonymous else place

    def stamp(self) -> object:
        """Return a value that changes when another broker may serve the home."""
        return stamp(self.home) if self.home else None


def addresses_of(text: str) -> list[str]:
    """Return each host:port of addresses that are separated by commas.

    Raises:
        RequestError: some are encrypted and others are not, or one is empty.
    """
    each = [address.strip() for address in text.split(",")]
    encrypted = {address.startswith(ENCRYPTED) for address in each}
    if len(encrypted) > 1:
        raise errors.RequestError(
            f"{text!r} has encrypted and other addresses.",
            remedy=f"Write {ENCRYPTED} before each of them.",
        )
    if len(each) > 1 and not all(map(bare, each)):
        raise errors.RequestError(
            f"{text!r} has an empty address.", remedy="Write HOST:PORT,HOST:PORT."
        )
    return list(map(bare, each))


def bare(address: str) -> str:
    """Return the host:port of an address without its protocol."""
    for scheme in (ENCRYPTED, *_PLAIN):
        address = address.removeprefix(scheme)
    return address


def place_of(endpoint: Endpoint, *, token: str | None = None) -> Place:
    """Return how processes of this machine reach the broker of an endpoint.

    Args:
        token: replaces the endpoint's token.
    """
    host, _, port = endpoint.flight.rpartition(":")
    address = f"{_ITSELF.get(host, host)}:{port}"
    token = token or endpoint.token
    if endpoint.certificate is None:
        return Place(address, token)
    trusted = Path(endpoint.certificate).read_bytes()
    return Place(address, token, True, trusted, endpoint.server_name)


#: A call counts as lost after this long without an answer, in addition to its own waiting time.
ANSWER_S = 300.0
_BACKOFF_S = 0.05
_TOKEN = wire.TOKEN.encode()
_BACKOFF_MAX_S = 1.0

# Every client has connections of its own and does not wait for the backoff of another client. A
# broker that comes back is therefore found at once.
_CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
]


#: Text of gRPC's error if it could not even connect.
_NO_CONNECTION = "failed to connect to all addresses"
#: Longest wait for one of several brokers, which may be on a machine that is gone.
_PROBE_S = 2.0


#: Answers of a broker that does not lead its log, or does so no more.
_NOT_LEADING = (errors.StandbyError, errors.LogFencedError)


#: With several addresses: a machine that is gone closes no connection, so ask for signs of life.
_WATCHED = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    # Otherwise a ping waits a minute for its answer.
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
]


class LostConnectionError(Exception):
    """The call has no answer; it may or may not have been sent."""

    @property
    def was_sent(self) -> bool:
        """Return False if the call was surely not sent."""
        return _NO_CONNECTION not in str(self)


class Connection:
    """Calls verbs on a broker that may go away and come back. Thread-safe."""

    def __init__(self, target: Target, *, retry_s: float) -> None:
        self.target = target
        self._retry_s = retry_s
        self._lock = threading.Lock()
        #: Held while a broker is looked for.
        self._searching = threading.Lock()
        self._client: flight.FlightClient | None = None
        self._token: str | None = None
        authorization = target.authorization()
        self._headers = [(b"authorization", authorization.encode())] if authorization else []
        #: Several are those of a leader and its standbys, the one that was used last first.
        self._addresses = target.addresses()
        if len(self._addresses) > 1:
            self._headers.append((wire.LEADER_ONLY.encode(), b"1"))
        self._stamp: object = None
        self._closed = threading.Event()
        self._running: set[flight.FlightStreamReader] = set()

    def call(self, verb_name: str, args: Mapping[str, Any]) -> Any:
        """Make a call; retry a repeatable one for up to ``retry_s``.

        Raises:
            BrokerUnavailableError: no broker answers; a call that may not be repeated may or may
                not have been carried out.
            RocketMQError: the error that the broker raised.
        """
        request = wire.request(verb_name, args)
        parts = request.parts()
        deadline = Deadline(self._retry_s)
        pause_s = _BACKOFF_S
        while True:
            try:
                return self._once(request, parts)
            except _NOT_LEADING as error:  # nothing was changed, so any call may be repeated
                if len(self._addresses) < 2 or self._closed.is_set() or pause_s > deadline.left_s:
                    raise
                log.info("the broker does not lead: %s", error.message)
            except (LostConnectionError, errors.BrokerUnavailableError) as error:
                late = pause_s > deadline.left_s
                if (
                    self._closed.is_set()
                    or late
                    or not self._may_repeat(error, request.verb, args=args)
                ):
                    raise _unavailable(error) from error
            except wire.TooManyCallsError as error:  # not begun, so any call may be repeated
                if self._closed.is_set() or pause_s > deadline.left_s:
                    raise errors.BusyError(error.message) from error
            # Jitter, so that the clients of a broker do not reconnect in step.
            self._closed.wait(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            pause_s = min(2 * pause_s, _BACKOFF_MAX_S)

    def _may_repeat(self, error: Exception, verb: Verb, *, args: Mapping[str, Any]) -> bool:
        if verb.may_repeat(args):
            return True
        not_sent = isinstance(error, LostConnectionError) and not error.was_sent
        return not_sent and len(self._addresses) > 1  # another broker may lead by now

    def close(self) -> None:
        """Disconnect: cancel calls that may take long, let quick calls finish."""
        self._closed.set()
        with self._lock:
            # Closing the client would crash the process if another thread were just beginning a
            # call. The client disconnects when its last call releases it.
            self._client = None
            running = list(self._running)
        for reader in running:
            reader.cancel()

    def _once(self, request: wire.Request, parts: Sequence[framing.Part]) -> Any:
        client, token = self._connected()
        try:
            return self._answer(client, token, request=request, parts=parts)
        except (*_NOT_LEADING, errors.StorageError):
            if len(self._addresses) > 1:
                self._drop(client)  # the next call looks for the broker that leads
            raise

    def _answer(
        self,
        client: flight.FlightClient,
        token: str | None,
        *,
        request: wire.Request,
        parts: Sequence[framing.Part],
    ) -> Any:
        command = request.command(parts)
        headers = [*self._headers, (_TOKEN, token.encode())] if token else self._headers
        options = flight.FlightCallOptions(
            timeout=ANSWER_S + _waits_s(request.args), headers=headers
        )
        try:
            size = len(command) + sum(data.size for _, data in parts)
            if request.verb.quick and size <= limits.FLIGHT_SLICE_BYTES:
                action = flight.Action(framing.CALL, framing.action(command, parts))
                answer = [result.body for result in client.do_action(action, options)]
            else:
                answer = self._exchange(client, command, parts=parts, options=options)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            wire.check_status(str(error))
            self._drop(client)
            raise LostConnectionError(str(error)) from error
        if not answer or any(data is None for data in answer):
            raise LostConnectionError("The call ended without an answer.")
        return wire.read_answer(answer)

    def _connected(self) -> tuple[flight.FlightClient, str | None]:
        """Return the open client; a new one if another broker now serves the home.

        Raises:
            BrokerUnavailableError: the home has no running broker, or no given one leads.
        """
        if (found := self._open()) is not None:
            return found
        with self._searching:  # the first thread looks for the broker, others use what it finds
            if (found := self._open()) is not None:
                return found
            now = self.target.stamp()
            if len(self._addresses) > 1:
                client, token = self._leader(), None
            else:
                place = self.target.locate()
                client, token = _client(place), place.token
            with self._lock:
                # Do not close the old client: other threads may wait on it; the last of them
                # releases it.
                self._client, self._token, self._stamp = client, token, now
            return client, token

    def _open(self) -> tuple[flight.FlightClient, str | None] | None:
        with self._lock:
            if self._closed.is_set():
                raise errors.BrokerUnavailableError(
                    "This client is closed.", remedy="Make a new client."
                )
            if self._client is None or self.target.stamp() != self._stamp:
                return None
            return self._client, self._token

    def _leader(self) -> flight.FlightClient:
        """Return a client of the broker that leads, and remember its address for the next time.

        Raises:
            StandbyError: none of them leads, or answers.
            RocketMQError: none of them leads, and one refuses the caller.
        """
        why, refusal = [], None
        for address in list(self._addresses):
            client = _client(self.target.locate(address), options=_WATCHED)
            try:
                self._probe(client)
            except (LostConnectionError, errors.BrokerUnavailableError) as error:
                why.append(f"{address}: {' '.join(str(error).split())}")
                continue
            except errors.RocketMQError as error:  # a standby may have older rules
                refusal = refusal or error
                continue
            self._addresses.remove(address)
            self._addresses.insert(0, address)
            return client
        if refusal is not None:
            raise refusal
        raise errors.StandbyError(
            f"No broker leads at {self.target.address}. {' '.join(why)}",
            remedy="Start one of them, or promote a standby: `rmq promote --flight HOST:PORT`.",
        )

    def _probe(self, client: flight.FlightClient) -> None:
        """Ask a broker for a sign of life.

        Raises:
            LostConnectionError: it does not answer.
            StandbyError: it is a standby.
        """
        request = wire.request("ping", {})
        parts = request.parts()
        options = flight.FlightCallOptions(timeout=_PROBE_S, headers=self._headers)
        action = flight.Action(framing.CALL, framing.action(request.command(parts), parts))
        try:
            answer = [result.body for result in client.do_action(action, options)]
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            wire.check_status(str(error))
            raise LostConnectionError(str(error)) from error
        wire.read_answer(answer)

    def _exchange(
        self,
        client: flight.FlightClient,
        command: bytes,
        *,
        parts: Sequence[framing.Part],
        options: flight.FlightCallOptions,
    ) -> list[pa.Buffer]:
        """Make one round trip; return the messages of the answer."""
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(command), options)
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
        """Register this call, so that ``close`` can cancel it."""
        with self._lock:
            self._running.add(reader)
        try:
            if self._closed.is_set():
                reader.cancel()
            yield
        finally:
            with self._lock:
                self._running.discard(reader)

    def _drop(self, client: flight.FlightClient) -> None:
        with self._lock:
            if self._client is client:
                self._client = None


def _client(place: Place, *, options: Sequence[tuple[str, int]] = ()) -> flight.FlightClient:
    chosen = [*_CHANNEL, *options]
    if not place.encrypted:
        return flight.FlightClient(f"grpc://{place.address}", generic_options=chosen)
    return flight.FlightClient(
        f"grpc+tls://{place.address}",
        generic_options=chosen,
        tls_root_certs=place.trusted,
        override_hostname=place.server_name,
    )


def _waits_s(args: Mapping[str, Any]) -> float:
    """Return the waiting time of a call in seconds; the broker refuses invalid values."""
    wait_ms, timeout_s = args.get("wait_ms"), args.get("timeout_s")
    found = 0.0
    if isinstance(wait_ms, int | float) and 0 <= wait_ms <= limits.POLL_MAX_MS:
        found += wait_ms / 1000
    if isinstance(timeout_s, int | float) and 0 <= timeout_s <= limits.QUERY_TIMEOUT_MAX_S:
        found += timeout_s
    return found


def _unavailable(error: Exception) -> errors.BrokerUnavailableError:
    if isinstance(error, errors.BrokerUnavailableError):
        return error
    return errors.BrokerUnavailableError(f"The connection to the broker was lost: {error}.")
