"""Endpoints of a broker: checks of their addresses and certificates, opening, closing together."""

import importlib
import itertools
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.access.source import is_loopback, listening, split_address
from rmq_pipeline.access.users import has_access_file
from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight.flags import (
    AS_LAST_TIME,
    NO_ENDPOINT,
    NO_TLS,
    SELF_MADE,
    Flags,
    Listening,
    checked,
)
from rmq_pipeline.flight.process import ANY_PORT
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.route_table import RouteFile
from rmq_pipeline.serving import connections
from rmq_pipeline.topic import Topic

if TYPE_CHECKING:
    from rmq_pipeline.rocketmq.grpc_endpoint import GrpcEndpoint

log = logging.getLogger(__name__)
Served = TypeVar("Served")

#: Time that running calls have to end. A client whose call is cut off does not know its result.
_GRACE_S: Final = 10.0
_GRPC_MODULE: Final = "rmq_pipeline.rocketmq.grpc_endpoint"


def check_flags(home: Path, flags: Flags, *, insecure: bool) -> None:
    """Refuse addresses that cannot be served, before the home is created or opened.

    Raises:
        RequestError: an address is malformed, or is beyond loopback while the home has no users.
            Also: a TLS address without a certificate or without the gRPC endpoint, or
            certificate files or a route table that cannot be used.
    """
    RouteFile.of(checked(flags.settings))
    # The store of the log may have users; ``Endpoints.open`` checks again.
    may_have_users = has_access_file(home) or flags.settings.get("log_store") is not None
    for address in _addresses(flags):
        listening(address, guarded=insecure or may_have_users)
    if flags.grpc_tls != NO_ENDPOINT and flags.tls == NO_TLS:
        raise RequestError(
            f"The TLS address {flags.grpc_tls} has no certificate.",
            remedy="Add --tls self-made, or --tls-cert and --tls-key.",
        )
    if flags.grpc_tls != NO_ENDPOINT and flags.grpc == NO_ENDPOINT:
        raise RequestError(
            f"The gRPC endpoint is off, so it cannot listen at the TLS address {flags.grpc_tls}.",
            remedy="Give --grpc an address, or --grpc-tls none.",
        )
    if not isinstance(flags.tls, str):
        certificate_of(home, flags)


def _check_guarded(broker: Broker, flags: Flags, *, insecure: bool) -> None:
    """Refuse addresses beyond loopback while the open home has no users.

    Once such an address is served, the last user cannot be deleted.

    Raises:
        RequestError: an address is beyond loopback and access control is off.
    """
    for address in _addresses(flags):
        host, _ = listening(address, guarded=insecure or broker.access.enabled)
        if not insecure and not is_loopback(host):
            broker.access.is_required = True


def certificate_of(home: Path, flags: Flags) -> Certificate | None:
    """Return the certificate that the flags select; None if TLS is off.

    Raises:
        RequestError: the given files cannot be read, or are not a matching certificate and key.
        OSError: a self-made certificate could not be written.
    """
    if flags.tls == NO_TLS:
        return None
    if flags.tls == SELF_MADE:
        return Certificate.self_made(home)
    chain, key = flags.tls
    return Certificate.read(Path(chain), Path(key))


def _addresses(flags: Flags) -> list[str]:
    given = (flags.flight, flags.grpc, flags.grpc_tls, flags.metrics)
    found = [each for each in given if each != NO_ENDPOINT]
    for address in found:
        split_address(address)
    return found


def import_ahead(grpc: str) -> None:
    """Import the gRPC endpoint in a thread: the import takes as long as opening a home."""
    if grpc != NO_ENDPOINT:
        threading.Thread(
            target=importlib.import_module, args=(_GRPC_MODULE,), name="rmq-import", daemon=True
        ).start()


class Endpoints:
    """The Flight endpoint and, unless it is switched off, the gRPC endpoint of one broker.

    A standby has no gRPC endpoint until it leads. RocketMQ's clients try the addresses that they
    are given in turn, and stay at the first one that takes their connection.
    """

    def __init__(
        self, flight: FlightServer, open_grpc: "Callable[[], GrpcEndpoint] | None"
    ) -> None:
        self.flight = flight
        self._open_grpc = open_grpc
        self.grpc: GrpcEndpoint | None = None

    @classmethod
    def open(
        cls,
        broker: Broker,
        flags: Flags,
        *,
        token: str,
        asked: Listening = AS_LAST_TIME,
        certificate: Certificate | None = None,
        insecure: bool = False,
    ) -> "Endpoints":
        """Listen at the addresses of the flags.

        Args:
            token: the owner's token, accepted by the Flight endpoint.
            asked: the addresses that this start asked for. A free loopback port replaces any
                other address that is taken.
            certificate: for the encrypted endpoints.
            insecure: allow addresses beyond loopback although the home has no users.

        Raises:
            RequestError: an address is taken, or is beyond loopback without access control. Also:
                the route table cannot be used.
        """
        routes = _routes(broker)
        _check_guarded(broker, flags, insecure=insecure)
        flight = listen(
            lambda at, _: FlightServer(
                broker,
                at,
                token=token,
                access=broker.access,
                certificate=certificate,
                insecure=insecure,
                tcp_port=broker.engine.settings.tcp_port,
            ),
            flags.flight,
            exchangeable=asked.flight is None,
        )
        if flags.grpc == NO_ENDPOINT:
            return cls(flight, None)
        opened = cls(
            flight,
            lambda: _grpc(broker, flags, asked=asked, certificate=certificate, routes=routes),
        )
        if not broker.is_standby:
            try:
                opened.open_grpc()
            except BaseException:
                flight.shutdown()
                raise
        return opened

    def open_grpc(self) -> bool:
        """Open the gRPC endpoint; return False if it is switched off.

        Raises:
            RequestError: its address is taken.
        """
        if self._open_grpc is None:
            return False
        self.grpc = self._open_grpc()
        return True

    def ports(self) -> list[int]:
        """Return the ports of all open endpoints."""
        ports = self.flight.ports()
        if self.grpc is not None:
            addresses = filter(None, (self.grpc.address, self.grpc.tls_address))
            ports += [int(address.rpartition(":")[2]) for address in addresses]
        return ports

    def refuse(self) -> None:
        """Answer all calls, including waiting ones, with the error that the broker is stopping."""
        self.flight.refuse()
        if self.grpc is not None:
            self.grpc.refuse()

    def shut(self) -> None:
        """Wait up to 10 s for running calls, then release deliveries that were never sent."""
        shutdowns = [self.flight.shutdown]
        if self.grpc is not None:
            shutdowns.append(self.grpc.shutdown)
        threads = [
            threading.Thread(target=shutdown, name="rmq-shutdown", daemon=True)
            for shutdown in shutdowns
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_GRACE_S)
        if any(thread.is_alive() for thread in threads):
            log.warning("calls still run after %s s; the broker stops without them", _GRACE_S)
        self.flight.take_back()


def _routes(broker: Broker) -> RouteFile | None:
    """Return the file of the route table, and show its state in the broker's status."""
    routes = RouteFile.of(broker.engine.settings)

    def find(name: str) -> Topic | None:
        state = broker.engine.state
        found = state.topics.get(state.topic_ids.get(name, 0))
        return None if found is None else found.topic

    if routes is not None:
        # A standby has no gRPC endpoint yet; its status shows the fault of a file all the same.
        broker.engine.reports["routes"] = partial(routes.report, find)
    return routes


def _grpc(
    broker: Broker,
    flags: Flags,
    *,
    asked: Listening,
    certificate: Certificate | None,
    routes: RouteFile | None,
) -> "GrpcEndpoint":
    from rmq_pipeline.rocketmq.grpc_endpoint import GrpcEndpoint

    encrypted = None if flags.grpc_tls == NO_ENDPOINT else flags.grpc_tls
    keys = (certificate.key, certificate.chain) if certificate and encrypted else None
    return listen(
        lambda at, tls_at: GrpcEndpoint(
            broker,
            at,
            tls_address=tls_at,
            certificates=keys,
            access=broker.access,
            connections=connections.most(),
            routes=routes,
        ),
        flags.grpc,
        exchangeable=asked.grpc is None,
        encrypted=encrypted,
        encrypted_exchangeable=encrypted is not None and asked.grpc_tls is None,
    )


def listen(
    served: Callable[[str, str | None], Served],
    address: str,
    *,
    exchangeable: bool,
    encrypted: str | None = None,
    encrypted_exchangeable: bool = False,
) -> Served:
    """Open an endpoint; if an exchangeable address is taken, retry it with a free port."""
    tries = itertools.product(
        [address, *[ANY_PORT] * exchangeable], [encrypted, *[ANY_PORT] * encrypted_exchangeable]
    )
    refused: RequestError | None = None
    for at, encrypted_at in tries:
        if refused is not None:
            log.warning("%s Trying %s.", refused, " and ".join(filter(None, (at, encrypted_at))))
        try:
            return served(at, encrypted_at)
        except RequestError as error:
            refused = refused or error
    assert refused is not None
    raise refused
