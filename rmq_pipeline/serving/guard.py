"""Checks of the addresses and certificates of the endpoints."""

from pathlib import Path

from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.access.source import is_loopback, listening, split_address
from rmq_pipeline.access.users import has_access_file
from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight.flags import NO_ENDPOINT, NO_TLS, SELF_MADE, Flags


def look_ahead(home: Path, flags: Flags, *, insecure: bool) -> None:
    """Refuse addresses that cannot be served, before the home is created or opened.

    Raises:
        RequestError: an address is malformed, or is beyond loopback while the home has no users.
            Also: a TLS address without a certificate or without the gRPC endpoint, or
            certificate files that cannot be used.
    """
    for address in _addresses(flags):
        listening(address, guarded=insecure or has_access_file(home))
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


def close(broker: Broker, flags: Flags, *, insecure: bool) -> None:
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
    found = [each for each in (flags.flight, flags.grpc, flags.grpc_tls) if each != NO_ENDPOINT]
    for address in found:
        split_address(address)
    return found
