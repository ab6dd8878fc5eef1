"""A broker answers scrapes over HTTP: whom it should, as many as it may, and for as long."""

import contextlib
import http.client
import json
import socket
import ssl
import threading
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rmq_pipeline import errors
from rmq_pipeline.flight import process
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.flags import SETTINGS_FILE, Listening
from rmq_pipeline.metrics import listener
from rmq_pipeline.metrics.listener import SCRAPES, MetricsListener
from tests.free_address import free_address, free_endpoints
from tests.metrics.samples import bodies
from tests.waiting import until


class Answer(NamedTuple):
    """Of a scrape."""

    status: int
    text: str
    kind: str


def scrape(
    address: str, *, user: str | None = None, path: str = "/metrics", trust: str | None = None
) -> Answer:
    request = urllib.request.Request(f"http{'s' if trust else ''}://{address}{path}")
    if user is not None:
        request.add_header("Authorization", f"Basic {b64encode(user.encode()).decode()}")
    context = ssl.create_default_context(cafile=trust) if trust else None
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            kind = answer.headers["Content-Type"]
            return Answer(answer.status, answer.read().decode(), kind)
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read().decode(), error.headers["Content-Type"])


@pytest.fixture
def served(home: Path) -> Iterator[Client]:
    process.start(home, listening=Listening(metrics=free_address()))
    try:
        with Client(home=home) as client:
            yield client
    finally:
        process.stop(home)


@pytest.fixture
def listening() -> Iterator[MetricsListener]:
    found = MetricsListener("127.0.0.1:0")
    yield found
    found.shutdown()


def test_a_scrape_is_what_the_verb_returns(served: Client) -> None:
    served.create_topic("t")
    served.send("t", bodies(b"abc"))
    address = served.status()["metrics"]

    until(lambda: 'rocketmq_messages_in_total{is_system="false"' in scrape(address).text)
    found = scrape(address)

    assert (found.status, found.kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families = {each.name: each for each in text_string_to_metric_families(found.text)}
    sample = families["rocketmq_messages_in"].samples[0]
    assert (sample.value, sample.labels["topic"]) == (1.0, "t")
    assert families["rmq_call_seconds"].type == "histogram"
    assert scrape(address, path="/").status == 404


def test_the_address_is_kept_for_the_next_start(home: Path, served: Client) -> None:
    address = served.status()["metrics"]
    process.stop(home)

    process.start(home)

    with Client(home=home) as client:
        assert client.status()["metrics"] == address
    assert scrape(address).status == 200
    assert json.loads((home / SETTINGS_FILE).read_text())["metrics"] == address
    assert f"metrics={address}" in (home / process.LOG_FILE).read_text()
    process.stop(home)
    process.start(home, listening=Listening(metrics="none"))
    with Client(home=home) as client:
        assert "metrics" not in client.status()


def test_an_address_beyond_loopback_needs_users(home: Path) -> None:
    with pytest.raises(errors.OperatorError, match="beyond loopback"):
        process.start(home, listening=Listening(metrics="0.0.0.0:0"))


def test_an_address_that_is_asked_for_and_taken_is_refused(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(errors.OperatorError, match=taken):
            process.start(home, listening=Listening(metrics=taken))


def test_with_users_a_scrape_needs_a_user_who_may_see_the_cluster(served: Client) -> None:
    address = served.status()["metrics"]
    served.create_user("root", password="a-long-password", type="super")
    served.create_user("prometheus", password="another-password")

    assert scrape(address).status == 401
    assert scrape(address, user="prometheus:wrong").status == 401
    refused = scrape(address, user="prometheus:another-password")
    served.put_policy("prometheus", resource="cluster:*", actions="get")
    allowed = scrape(address, user="prometheus:another-password")

    assert refused.status == 403
    assert "may not get" in refused.text
    assert allowed.status == 200
    assert scrape(address, user="root:a-long-password").status == 200


def test_with_tls_scrapes_are_encrypted(home: Path) -> None:
    endpoints = free_endpoints(tls="self-made")
    process.start(
        home,
        listening=Listening(
            flight=endpoints.flight, grpc="none", tls="self-made", metrics="localhost:0"
        ),
    )
    try:
        with Client(home=home) as client:
            address = client.status()["metrics"]
        trust = str(home / "tls" / "certificate.pem")
        assert scrape(address, trust=trust).status == 200
        with pytest.raises((urllib.error.URLError, http.client.HTTPException, OSError)):
            scrape(address)
    finally:
        process.stop(home)


def test_a_broker_that_starts_or_stops_says_so(listening: MetricsListener) -> None:
    starting = scrape(listening.address)
    listening.serve(lambda _authorization, _peer: b"text\n")
    serving = scrape(listening.address)
    listening.refuse()
    stopping = scrape(listening.address)

    assert (starting.status, starting.text.strip()) == (503, "The broker is starting.")
    assert (serving.status, serving.text) == (200, "text\n")
    assert (stopping.status, stopping.text.strip()) == (503, "The broker is stopping.")


def test_a_failure_is_answered_in_a_sentence(listening: MetricsListener) -> None:
    def failing(_authorization: str | None, _peer: str) -> bytes:
        raise ZeroDivisionError

    listening.serve(failing)

    assert scrape(listening.address).status == 500


def test_so_many_scrapes_run_at_once(listening: MetricsListener) -> None:
    begun, let_go = threading.Semaphore(0), threading.Event()

    def slow(_authorization: str | None, _peer: str) -> bytes:
        begun.release()
        let_go.wait(60)
        return b""

    listening.serve(slow)
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(scrape(listening.address).status))
        for _ in range(SCRAPES)
    ]
    for thread in threads:
        thread.start()
    assert all(begun.acquire(timeout=60) for _ in threads)

    host, _, port = listening.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as refused:
        said = refused.recv(1000)
    let_go.set()
    for thread in threads:
        thread.join()

    assert said.startswith(b"HTTP/1.0 503")
    assert found == [200] * SCRAPES
    assert scrape(listening.address).status == 200


def test_a_client_that_drips_is_cut_off(
    listening: MetricsListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "LIFE_S", 0.3)
    host, _, port = listening.address.rpartition(":")
    with contextlib.closing(socket.create_connection((host, int(port)))) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        client.settimeout(0.05)
        gone: list[bool] = []

        def drip() -> bool:
            try:
                client.sendall(b"x")
                gone.append(client.recv(100) == b"")
            except TimeoutError:
                return False
            except OSError:
                gone.append(True)
            return gone[-1]

        until(drip, within_s=20)

    assert gone[-1]
