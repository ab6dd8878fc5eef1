"""Where calls come from, and where endpoints may listen."""

import pytest

from rmq_pipeline.access.source import address_of, listening
from rmq_pipeline.errors import RequestError


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.1.2.3:4711", "10.1.2.3"),
        ("ipv6:[::1]:4711", "::1"),
        ("ipv6:%5B::1%5D:4711", "::1"),
        ("ipv6:[::ffff:10.1.2.3]:4711", "10.1.2.3"),
        ("10.1.2.3", "10.1.2.3"),
        ("::1", "::1"),
        ("unix:/run/x", ""),
        ("", ""),
        ("ipv4:nonsense", ""),
    ],
)
def test_the_address_in_what_grpc_names(peer: str, address: str) -> None:
    assert address_of(peer) == address


@pytest.mark.parametrize(
    "address", ["127.0.0.1:80", "localhost:80", "127.9.9.9:80", "[::1]:80", "::1:80"]
)
def test_on_loopback_endpoints_listen(address: str) -> None:
    assert listening(address, guarded=False)[1] == 80


@pytest.mark.parametrize("address", ["0.0.0.0:80", "[::]:80", "10.1.2.3:80", "example.org:80"])
def test_beyond_loopback_they_are_guarded(address: str) -> None:
    with pytest.raises(RequestError, match="no access control"):
        listening(address, guarded=False)

    assert listening(address, guarded=True)[1] == 80
