"""The doors of an open broker, opened and closed together."""

import importlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight.flags import NO_DOOR, Flags
from rmq_pipeline.flight.process import ANY_PORT
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.serving import guard

if TYPE_CHECKING:
    from rmq_pipeline.rocketmq.door import GrpcDoor

log = logging.getLogger(__name__)
Door = TypeVar("Door")

#: Running calls get this long to end; their clients repeat them, or learn that it is not known.
_GRACE_S: Final = 10.0
_GRPC_MODULE: Final = "rmq_pipeline.rocketmq.door"


def import_ahead(grpc: str) -> None:
    """Begin to import the door for RocketMQ clients, which takes as long as to open a home."""
    if grpc != NO_DOOR:
        threading.Thread(
            target=importlib.import_module, args=(_GRPC_MODULE,), name="rmq-import", daemon=True
        ).start()


class Doors:
    """Both doors."""

    def __init__(self, flight: FlightServer, grpc: "GrpcDoor | None") -> None:
        self.flight = flight
        self.grpc = grpc

    @classmethod
    def open(
        cls,
        broker: Broker,
        flags: Flags,
        *,
        token: str,
        chosen: tuple[bool, bool],
        certificate: Certificate | None = None,
        insecure: bool = False,
    ) -> "Doors":
        """Listen; where a port that was only remembered is taken, at a free one.

        Args:
            chosen: whether the addresses of Flight and gRPC were asked for.
            certificate: for the doors that are encrypted.
            insecure: beyond loopback, too, when there is no access control.

        Raises:
            RequestError: an address that was asked for is taken, or one is not to be listened at.
        """
        guard.close(broker, flags, insecure=insecure)
        flight = _listen(
            lambda at: FlightServer(
                broker,
                at,
                token=token,
                access=broker.access,
                certificate=certificate,
                insecure=insecure,
            ),
            flags.flight,
            chosen=chosen[0],
        )
        if flags.grpc == NO_DOOR:
            return cls(flight, None)
        from rmq_pipeline.rocketmq.door import GrpcDoor

        encrypted = None if flags.grpc_tls == NO_DOOR else flags.grpc_tls
        keys = (certificate.key, certificate.chain) if certificate and encrypted else None
        try:
            grpc = _listen(
                lambda at: GrpcDoor(
                    broker, at, tls_address=encrypted, certificates=keys, access=broker.access
                ),
                flags.grpc,
                chosen=chosen[1],
            )
        except RequestError:
            flight.shutdown()
            raise
        return cls(flight, grpc)

    def refuse(self) -> None:
        """From now on answer every call, waiting ones too, that the broker is stopping."""
        self.flight.refuse()
        if self.grpc is not None:
            self.grpc.refuse()

    def shut(self) -> None:
        """Let running calls end, for a while."""
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
            log.warning("calls still run after %s s: leaving them", _GRACE_S)


def _listen(open_door: Callable[[str], Door], address: str, *, chosen: bool) -> Door:
    try:
        return open_door(address)
    except RequestError:
        if chosen:
            raise
        log.warning("%s is taken: using another port", address)
        return open_door(ANY_PORT)
