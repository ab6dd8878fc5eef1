"""Address and credentials with which a client reaches its broker."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rmq_pipeline import errors
from rmq_pipeline.access import credentials
from rmq_pipeline.endpoint import Endpoint, default_home, stamp

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
    """How to find the broker: a fixed address, or the endpoint file of a home."""

    address: str | None = None
    home: Path | None = None
    token: str | None = field(default=None, repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    encrypted: bool = False
    #: File of trusted certificates.
    certificate: Path | None = None

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
    ) -> "Target":
        """Combine the arguments with the environment; without both, use the default home.

        RMQ_FLIGHT is an address; RMQ_USER, RMQ_PASSWORD and RMQ_CERTIFICATE are the other
        variables.

        Raises:
            RequestError: a user without a password, or a password without a user.
        """
        address = address or (None if home else os.environ.get("RMQ_FLIGHT"))
        if user is None and password is None:
            user, password = os.environ.get("RMQ_USER"), os.environ.get("RMQ_PASSWORD")
        if bool(user) != bool(password):
            raise errors.RequestError("A user and a password go together.")
        trusted = certificate or os.environ.get("RMQ_CERTIFICATE") or None
        if not address:
            where = Path(home) if home else default_home()
            return cls(None, where, token, user or None, password or None)
        return cls(
            bare(address),
            None,
            token,
            user or None,
            password or None,
            encrypted=address.startswith(ENCRYPTED) or trusted is not None,
            certificate=Path(trusted) if trusted else None,
        )

    def authorization(self) -> str | None:
        """Return the header with the credentials; None without a user."""
        if self.user is None or self.password is None:
            return None
        return credentials.basic(self.user, self.password)

    def locate(self) -> Place:
        """Return the address and the token to send.

        Raises:
            BrokerUnavailableError: the home has no running broker.
            OSError: the certificate file cannot be read.
        """
        if self.address:
            trusted = self.certificate.read_bytes() if self.certificate else None
            return Place(self.address, self.token, self.encrypted, trusted)
        assert self.home is not None
        endpoint = Endpoint.read(self.home)
        if endpoint is None or not endpoint.is_alive():
            raise errors.BrokerUnavailableError(f"No broker serves {self.home}.")
        return place_of(endpoint, token=self.token)

    def stamp(self) -> object:
        """Return a value that changes when another broker may serve the home."""
        return stamp(self.home) if self.home else None


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
