"""Addresses: the source of a call, and the addresses of endpoints."""

import ipaddress
import socket
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import unquote

import psutil

from rmq_pipeline.errors import RequestError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Parse IP addresses and CIDR blocks; duplicates are dropped.

    Raises:
        RequestError: a text is neither.
    """
    found: dict[Network, None] = {}
    for text in texts:
        try:
            found[ipaddress.ip_network(text.strip(), strict=False)] = None
        except ValueError as error:
            raise RequestError(
                f"{text!r} is not an IP address or network.",
                remedy="Write an address such as 10.1.2.3, or a network such as 10.1.0.0/16.",
            ) from error
    return tuple(found)


@lru_cache(1024)
def address_of(peer: str) -> str:
    """Return the IP address of a peer, as gRPC names it; "" if it names none.

    An IPv4 address mapped into IPv6 is returned as IPv4.
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
    """Split HOST:PORT; localhost becomes 127.0.0.1.

    Raises:
        RequestError: the address is malformed.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not port.isascii() or int(port) > 65535:
        raise RequestError(
            f"{address!r} is not HOST:PORT.", remedy="Write an address such as 127.0.0.1:8082."
        )
    return ("127.0.0.1" if host == "localhost" else host.strip("[]")), int(port)


def is_address(host: str) -> bool:
    """Return True if the host is an IP address; False for a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return True if the host is a loopback address; False for a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_free(host: str, port: int) -> None:
    """Refuse an address that cannot be bound: a gRPC server reports no reason for a failed start.

    Raises:
        RequestError: the address is taken, or does not belong to this machine.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise RequestError(
                f"Cannot listen on {host}:{port}: {error}{holder_of(port)}.",
                remedy="Choose another address or port, or stop the process that uses this one.",
            ) from error


def holder_of(port: int) -> str:
    """Return which process listens at a port, as the end of a sentence; "" if it is unknown."""
    try:
        for each in psutil.net_connections("tcp"):
            at = each.laddr[1] if each.laddr else None
            if each.status == psutil.CONN_LISTEN and at == port and each.pid:
                return f" by process {each.pid} ({psutil.Process(each.pid).name()})"
    except (psutil.Error, OSError):  # another user's process, or no /proc
        pass
    return ""


def listening(address: str, *, guarded: bool) -> tuple[str, int]:
    """Return host and port of an endpoint's address if the endpoint may listen there.

    Args:
        address: HOST:PORT.
        guarded: access control is on, or was explicitly waived.

    Raises:
        RequestError: the address is malformed, or is beyond loopback and not guarded.
    """
    host, port = split_address(address)
    if guarded or is_loopback(host):
        return host, port
    raise RequestError(
        f"{address!r} is beyond loopback, and the home has no access control: every caller could "
        "do everything.",
        remedy="Create a user first, with the broker on loopback: `rmq user create NAME --super`. "
        "Or add --insecure.",
    )
