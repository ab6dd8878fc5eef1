"""The doors of an open broker, opened and closed together."""

import importlib
import itertools
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight.flags import AS_LAST_TIME, NO_DOOR, Flags, Listening
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
        asked: Listening = AS_LAST_TIME,
        certificate: Certificate | None = None,
        insecure: bool = False,
    ) -> "Doors":
        """Listen; where a port that was only remembered is taken, at a free one.

        Args:
            asked: what was asked for: an address that is in it is not exchanged for another.
            certificate: for the doors that are encrypted.
            insecure: beyond loopback, too, when there is no access control.

        Raises:
            RequestError: an address that was asked for is taken, or one is not to be listened at.
        """
        guard.close(broker, flags, insecure=insecure)
        flight = _listen(
            lambda at, _: FlightServer(
                broker,
                at,
                token=token,
                access=broker.access,
                certificate=certificate,
                insecure=insecure,
            ),
            flags.flight,
            exchangeable=asked.flight is None,
        )
        if flags.grpc == NO_DOOR:
            return cls(flight, None)
        from rmq_pipeline.rocketmq.door import GrpcDoor

        encrypted = None if flags.grpc_tls == NO_DOOR else flags.grpc_tls
        keys = (certificate.key, certificate.chain) if certificate and encrypted else None
        try:
            grpc = _listen(
                lambda at, tls_at: GrpcDoor(
                    broker, at, tls_address=tls_at, certificates=keys, access=broker.access
                ),
                flags.grpc,
                exchangeable=asked.grpc is None,
                encrypted=encrypted,
                encrypted_exchangeable=encrypted is not None and asked.grpc_tls is None,
            )
        except BaseException:
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


def _listen(
    open_door: Callable[[str, str | None], Door],
    address: str,
    *,
    exchangeable: bool,
    encrypted: str | None = None,
    encrypted_exchangeable: bool = False,
) -> Door:
    """Open a door where it was the last time; what is taken by now is exchanged for a free port."""
    tries = itertools.product(
        [address, *[ANY_PORT] * exchangeable], [encrypted, *[ANY_PORT] * encrypted_exchangeable]
    )
    refused: RequestError | None = None
    for at, encrypted_at in tries:
        if refused is not None:
            log.warning("%s Trying %s.", refused, " and ".join(filter(None, (at, encrypted_at))))
        try:
            return open_door(at, encrypted_at)
        except RequestError as error:
            refused = refused or error
    assert refused is not None
    raise refused
