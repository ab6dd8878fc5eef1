"""A free port of the loopback, for a server that uses it again after each death."""

import random
import socket
from typing import Final

from rmq_pipeline.flight.flags import Listening, Tls

#: Below those that systems give out themselves: no connection of another test takes it meanwhile.
_PORTS: Final = range(10_000, 32_000)
#: Those that this process has given out: a server that has several binds one after the other.
_GIVEN: Final[set[int]] = set()


def free_port() -> int:
    """On 127.0.0.1."""
    # Not of the seeded generator of a test: tests beside it would come to the same ports.
    dice = random.SystemRandom()
    while True:
        port = dice.choice(_PORTS)
        if port in _GIVEN:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _GIVEN.add(port)
        return port


def free_address() -> str:
    """``127.0.0.1:port``."""
    return f"127.0.0.1:{free_port()}"


def free_endpoints(*, tls: Tls | None = None) -> Listening:
    """Each endpoint of a broker at a port of its own, also the encrypted one for gRPC."""
    flight, grpc, grpc_tls = free_address(), free_address(), free_address()
    return Listening(flight=flight, grpc=grpc, grpc_tls=grpc_tls if tls else None, tls=tls)
