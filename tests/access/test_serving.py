"""``rmq broker`` with users and certificates, in a process of its own."""

import datetime as dt
import hashlib
import hmac
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from rmq_pipeline import errors
from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.flight import process
from rmq_pipeline.flight.client import Client
from rmq_pipeline.rocketmq import protocol
from tests.cli.conftest import Served, end, serve

ANY = "127.0.0.1:0"
ROUTE = f"/{protocol.SERVICE}/QueryRoute"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving") / "home"


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Served]:
    served = serve(home, "--grpc", ANY, "--grpc-tls", ANY, "--tls", "self-made")
    with Client(home=home) as client:
        client.create_topic("orders")
        client.create_user("ann", password="ann-password")
        client.put_policy("ann", resource="topic:orders", actions=["pub"])
    yield served
    end(served)


@pytest.fixture
def endpoint(served: Served) -> Endpoint:
    found = Endpoint.read(served.home)
    assert found is not None
    return found


def test_the_ready_line_names_every_endpoint(served: Served, endpoint: Endpoint) -> None:
    assert served.ready == (
        f"ready grpc={endpoint.grpc} grpc_tls={endpoint.grpc_tls} flight={endpoint.flight} "
        f"home={served.home}\n"
    )


def test_a_reader_of_the_home_finds_the_certificate_there(served: Served) -> None:
    with Client(home=served.home, retry_s=0) as client:
        assert client.list_users()["name"].to_pylist() == ["ann"]

    assert process.serving(served.home) is not None


def test_others_need_user_and_certificate(
    served: Served, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = served.home / "tls" / "certificate.pem"
    ann: dict[str, Any] = {"user": "ann", "password": "ann-password"}

    with Client(endpoint.flight, certificate=trusted, retry_s=0, **ann) as client:
        assert client.ping()
        with pytest.raises(errors.ForbiddenError):
            client.list_users()
    with (
        Client(endpoint.flight, certificate=trusted, retry_s=0) as nobody,
        pytest.raises(errors.UnauthorizedError),
    ):
        nobody.ping()
    for address in (endpoint.flight, f"grpc+tls://{endpoint.flight}"):
        with (
            Client(address, retry_s=0, user="ann", password="ann-password") as mistrusting,
            pytest.raises(errors.BrokerUnavailableError),
        ):
            mistrusting.ping()

    for name, value in {**ann, "certificate": str(trusted)}.items():
        monkeypatch.setenv(f"RMQ_{name.upper()}", value)
    with Client(f"grpc+tls://{endpoint.flight}", retry_s=0) as client:
        assert client.ping()


def test_a_user_and_a_password_go_together() -> None:
    halves: list[dict[str, Any]] = [{"user": "ann"}, {"password": "secret"}]
    for half in halves:
        with pytest.raises(errors.RequestError, match="go together"):
            Client("127.0.0.1:1", **half)


def route(
    channel: grpc.Channel, date_time: str, *, topic: str = "orders", secret: str | None = None
) -> int:
    """The code that the endpoint for RocketMQ clients answers."""
    metadata = [("x-mq-client-id", "test"), ("x-mq-date-time", date_time)]
    if secret is not None:
        signature = hmac.new(secret.encode(), date_time.encode(), hashlib.sha1).hexdigest()
        signed = f"SignedHeaders=x-mq-date-time, Signature={signature}"
        metadata.append(("authorization", f"MQv2-HMAC-SHA1 Credential=ann, {signed}"))
    call = channel.unary_unary(
        ROUTE,
        request_serializer=protocol.QueryRouteRequest.SerializeToString,
        response_deserializer=protocol.QueryRouteResponse.FromString,
    )
    request = protocol.QueryRouteRequest(topic=protocol.Resource(name=topic))
    code: int = call(request, metadata=metadata, timeout=20).status.code
    return code


def test_rocketmq_clients_sign_their_calls_on_both_ports(
    served: Served, endpoint: Endpoint
) -> None:
    # What is signed is a time near now, whatever zone the client thinks it is in.
    now = (dt.datetime.now(dt.UTC) + dt.timedelta(hours=14)).strftime("%Y%m%dT%H%M%SZ")
    trusted = (served.home / "tls" / "certificate.pem").read_bytes()
    assert endpoint.grpc is not None
    assert endpoint.grpc_tls is not None
    credentials = grpc.ssl_channel_credentials(trusted)

    for channel in (
        grpc.insecure_channel(endpoint.grpc),
        grpc.secure_channel(endpoint.grpc_tls, credentials),
    ):
        with channel:
            assert route(channel, now, secret="ann-password") == 20000
            assert route(channel, now, secret="ann-password", topic="others") == 40300
            assert route(channel, now, secret="wrong-password") == 40100
            assert route(channel, now) == 40100


def test_after_a_restart_users_and_certificate_are_the_same(tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = serve(home, "--grpc", "none", "--tls", "self-made")
    with Client(home=home) as client:
        client.create_user("ann")
    certificate = (home / "tls" / "certificate.pem").read_bytes()
    end(first)

    # With users the endpoint may be open to all; what was not said is as it was.
    again = serve(home, "--flight", "0.0.0.0:0", "--grpc", "none")

    assert "flight=0.0.0.0:" in again.ready
    assert (home / "tls" / "certificate.pem").read_bytes() == certificate
    with Client(home=home) as client:
        assert client.list_users()["name"].to_pylist() == ["ann"]
        with pytest.raises(errors.InUseError):
            client.delete_user("ann")
    end(again)


def test_beyond_loopback_without_users_is_for_those_who_say_so(tmp_path: Path) -> None:
    home = tmp_path / "home"
    served = serve(home, "--flight", "0.0.0.0:0", "--grpc", "none", "--insecure")

    assert "flight=0.0.0.0:" in served.ready
    with Client(home=home) as client:
        assert client.list_users().num_rows == 0
    end(served)
