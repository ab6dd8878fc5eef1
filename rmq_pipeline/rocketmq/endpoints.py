"""Addresses of this broker, as its clients have found it."""

from typing import Any

from rmq_pipeline.rocketmq.protocol import Address, AddressScheme, Endpoints


def endpoints(dialled: Any) -> Any:
    """The address a client dialled; None when it does not say."""
    if not dialled.addresses:
        return None
    if dialled.scheme == AddressScheme.DOMAIN_NAME and len(dialled.addresses) > 1:
        return Endpoints(scheme=dialled.scheme, addresses=dialled.addresses[:1])
    return dialled


def endpoints_of(address: str) -> Any:
    """An address that this door listens on."""
    host, _, port = address.rpartition(":")
    scheme = AddressScheme.IPv6 if ":" in host else AddressScheme.IPv4
    return Endpoints(scheme=scheme, addresses=[Address(host=host.strip("[]"), port=int(port))])
