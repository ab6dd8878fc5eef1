"""Addresses of this broker in the protocol's form."""

from typing import Any

from rmq_pipeline.rocketmq.protocol import Address, AddressScheme, Endpoints


def endpoints(dialled: Any) -> Any:
    """Return the address that a client dialled, with one host name; None if it names none."""
    if not dialled.addresses:
        return None
    if dialled.scheme == AddressScheme.DOMAIN_NAME and len(dialled.addresses) > 1:
        return Endpoints(scheme=dialled.scheme, addresses=dialled.addresses[:1])
    return dialled


def endpoints_of(address: str) -> Any:
    """Return an address that the endpoint listens on."""
    host, _, port = address.rpartition(":")
    scheme = AddressScheme.IPv6 if ":" in host else AddressScheme.IPv4
    return Endpoints(scheme=scheme, addresses=[Address(host=host.strip("[]"), port=int(port))])
