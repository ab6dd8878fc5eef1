"""A port of the loopback that nobody has, for a server that keeps it through its deaths."""

import random
import socket
from typing import Final

#: Below those that systems give out themselves: no connection of another test takes it meanwhile.
_PORTS: Final = range(10_000, 32_000)


def free_address() -> str:
    """``127.0.0.1:port``."""
    # Not of the seeded generator of a test: tests beside it would come to the same ports.
    dice = random.SystemRandom()
    while True:
        address = ("127.0.0.1", dice.choice(_PORTS))
        with socket.socket() as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
        return f"{address[0]}:{address[1]}"
