"""A free port of the loopback, for a server that uses it again after each death."""

import random
import socket
from typing import Final

from rmq_pipeline.flight.flags import Listening, Tls

#: Below those that systems give out themselves: no connection of another test takes it meanwhile.
_PORTS: Final = range(10_000, 32_000)


def free_port() -> int:
    """On 127.0.0.1."""
    # Not of the seeded generator of a test: tests beside it would come to the same ports.
    dice = random.SystemRandom()
    while True:
        port = dice.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def free_address() -> str:
    """``127.0.0.1:port``."""
    return f"127.0.0.1:{free_port()}"


def free_endpoints(*, tls: Tls | None = None) -> Listening:
    """Each endpoint of a broker at a port of its own, also the encrypted one for gRPC."""
    ports: set[int] = set()
    while len(ports) < 3:
        ports.add(free_port())
    flight, grpc, grpc_tls = (f"127.0.0.1:{port}" for port in ports)
    return Listening(flight=flight, grpc=grpc, grpc_tls=grpc_tls if tls else None, tls=tls)
