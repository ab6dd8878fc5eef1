"""Where doors may listen, and with which certificate."""

from pathlib import Path

from rmq_pipeline.access import file
from rmq_pipeline.access.certificates import Certificate
from rmq_pipeline.access.source import is_loopback, listening, split_address
from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight.flags import NO_DOOR, NO_TLS, SELF_MADE, Flags


def look_ahead(home: Path, flags: Flags, *, insecure: bool) -> None:
    """Refuse addresses that cannot be served, before a home is made or opened.

    Raises:
        RequestError: one is none, or lies beyond loopback, and the home has no users; or one is
            for TLS, and there is no certificate, or its files are none.
    """
    for address in _addresses(flags):
        listening(address, guarded=insecure or file.exists(home))
    if flags.grpc_tls != NO_DOOR and flags.tls == NO_TLS:
        raise RequestError("An address for TLS needs a certificate: say --tls self-made, too.")
    if flags.grpc_tls != NO_DOOR and flags.grpc == NO_DOOR:
        raise RequestError("The door at the address for TLS is shut: give --grpc an address.")
    if not isinstance(flags.tls, str):
        certificate_of(home, flags)


def close(broker: Broker, flags: Flags, *, insecure: bool) -> None:
    """Refuse addresses beyond loopback without users, and keep the last user where there are some.

    Raises:
        RequestError: everybody who reaches an address could do everything.
    """
    for address in _addresses(flags):
        host, _ = listening(address, guarded=insecure or broker.access.enabled)
        if not insecure and not is_loopback(host):
            broker.access.is_required = True


def certificate_of(home: Path, flags: Flags) -> Certificate | None:
    """What the doors show; None: nothing, they are not encrypted.

    Raises:
        RequestError: the files that were given are none.
    """
    if flags.tls == NO_TLS:
        return None
    if flags.tls == SELF_MADE:
        return Certificate.self_made(home)
    chain, key = flags.tls
    return Certificate.read(Path(chain), Path(key))


def _addresses(flags: Flags) -> list[str]:
    found = [each for each in (flags.flight, flags.grpc, flags.grpc_tls) if each != NO_DOOR]
    for address in found:
        split_address(address)
    return found
