"""A connection to the Flight endpoint: finds the broker, makes calls, reconnects."""

import logging
import os
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

from rmq_pipeline import errors
from rmq_pipeline.access import credentials
from rmq_pipeline.clock import Deadline
from rmq_pipeline.endpoint import Endpoint, default_home, stamp
from rmq_pipeline.flight import framing, wire
from rmq_pipeline.flight.channel import (
    NOT_LEADING,
    PROBE_S,
    Channel,
    LostConnectionError,
    Place,
    SilentBrokerError,
)
from rmq_pipeline.verb import Verb

log = logging.getLogger(__name__)

ENCRYPTED: Final = "grpc+tls://"
#: Other prefixes of an address.
_PLAIN: Final = ("grpc://", "grpc+tcp://")
#: Addresses for all interfaces, and the loopback address that reaches them.
_ITSELF: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - nothing listens here


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


_BACKOFF_S = 0.05
_BACKOFF_MAX_S = 1.0


class Connection:
    """Calls verbs on a broker that may go away and come back. Thread-safe."""

    def __init__(self, target: Target, *, retry_s: float) -> None:
        self.target = target
        self._retry_s = retry_s
        self._lock = threading.Lock()
        #: Held while a broker is looked for.
        self._searching = threading.Lock()
        self._channel: Channel | None = None
        #: All whose calls may still run.
        self._channels: WeakSet[Channel] = WeakSet()
        authorization = target.authorization()
        self._headers = {"authorization": authorization} if authorization else {}
        #: Several are those of a leader and its standbys, the one that was used last first.
        self._addresses = target.addresses()
        #: Address of the last broker that stood still: it is asked last, as it takes PROBE_S.
        self._silent_address: str | None = None
        if len(self._addresses) > 1:
            self._headers[wire.LEADER_ONLY] = "1"
        self._stamp: object = None
        self._closed = threading.Event()

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
            except NOT_LEADING as error:  # nothing was changed, so any call may be repeated
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
            self._channel = None
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    def _once(self, request: wire.Request, parts: Sequence[framing.Part]) -> Any:
        channel = self._connected()
        try:
            return channel.call(request, parts)
        except LostConnectionError as error:
            self._drop(channel, is_silent=isinstance(error, SilentBrokerError))
            raise
        except (*NOT_LEADING, errors.StorageError):
            if len(self._addresses) > 1:
                self._drop(channel)  # the next call looks for the broker that leads
            raise

    def _connected(self) -> Channel:
        """Return the open channel; a new one if another broker now serves the home.

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
                channel = self._leader()
            else:
                channel = Channel(self.target.locate(), headers=self._headers)
            with self._lock:
                # Do not close the old channel: other threads may wait on it; the last of them
                # releases it.
                self._channel, self._stamp = channel, now
                self._channels.add(channel)
                is_late = self._closed.is_set()
            if is_late:
                channel.close()
            return channel

    def _open(self) -> Channel | None:
        with self._lock:
            if self._closed.is_set():
                raise errors.BrokerUnavailableError(
                    "This client is closed.", remedy="Make a new client."
                )
            if self._channel is None or self.target.stamp() != self._stamp:
                return None
            return self._channel

    def _leader(self) -> Channel:
        """Return a channel to the broker that leads, and remember its address for the next time.

        Raises:
            StandbyError: none of them leads, or answers.
            RocketMQError: none of them leads, and one refuses the caller.
        """
        why, refusal = [], None
        for address in sorted(self._addresses, key=lambda one: one == self._silent_address):
            place = self.target.locate(address)
            channel = Channel(place, headers=self._headers, is_watched=True)
            try:
                channel.probe(timeout_s=PROBE_S)
            except (LostConnectionError, errors.BrokerUnavailableError) as error:
                why.append(f"{address}: {' '.join(str(error).split())}")
                continue
            except errors.RocketMQError as error:  # a standby may have older rules
                refusal = refusal or error
                continue
            self._addresses.remove(address)
            self._addresses.insert(0, address)
            return channel
        if refusal is not None:
            raise refusal
        raise errors.StandbyError(
            f"No broker leads at {self.target.address}. {' '.join(why)}",
            remedy="Start one of them, or promote a standby: `rmq promote --flight HOST:PORT`.",
        )

    def _drop(self, channel: Channel, *, is_silent: bool = False) -> None:
        with self._lock:
            if self._channel is channel:
                self._channel = None
                if is_silent:
                    self._silent_address = next(iter(self._addresses), None)


def _unavailable(error: Exception) -> errors.BrokerUnavailableError:
    if isinstance(error, errors.BrokerUnavailableError):
        return error
    return errors.BrokerUnavailableError(f"The connection to the broker was lost: {error}.")
