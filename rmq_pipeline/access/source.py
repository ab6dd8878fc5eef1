"""Where a call comes from, and where a door may listen."""

import ipaddress
import socket
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import unquote

from rmq_pipeline.errors import RequestError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Addresses and CIDR blocks, each once.

    Raises:
        RequestError: one is neither.
    """
    found: dict[Network, None] = {}
    for text in texts:
        try:
            found[ipaddress.ip_network(text.strip(), strict=False)] = None
        except ValueError as error:
            raise RequestError(
                f"{text!r} is no source address: write 10.1.2.3 or 10.1.0.0/16."
            ) from error
    return tuple(found)


@lru_cache(1024)
def address_of(peer: str) -> str:
    """The IP address of a caller as gRPC names it; "" where it names none.

    An IPv4 address that comes by way of IPv6 is itself.
    """
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else peer
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of an address; localhost as a number.

    Raises:
        RequestError: it is no host:port.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not port.isascii() or int(port) > 65535:
        raise RequestError(f"{address!r} is not HOST:PORT.")
    return ("127.0.0.1" if host == "localhost" else host.strip("[]")), int(port)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_free(host: str, port: int) -> None:
    """Refuse an address where somebody listens; a gRPC server says only that it did not start.

    Raises:
        RequestError: it is taken, or not of this machine.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise RequestError(f"Cannot listen on {host}:{port}: {error}.") from error


def listening(address: str, *, guarded: bool) -> tuple[str, int]:
    """Host and port of an address that a door is to listen at.

    Args:
        guarded: callers have to say who they are, or it was said that they need not.

    Raises:
        RequestError: it is none, or lies beyond loopback and is not guarded.
    """
    host, port = split_address(address)
    if guarded or is_loopback(host):
        return host, port
    raise RequestError(
        f"{address!r} is not on loopback, and there is no access control: everybody who reaches "
        "it could do everything. Create a user first, with the broker on loopback: "
        "`rmq user create NAME --super`. Or say --insecure."
    )
