"""A served home answers at both endpoints, and where it did before."""

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.errors import BrokerUnavailableError, RocketMQError
from rmq_pipeline.flight import process
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.flags import SETTINGS_FILE, Flags, Listening, given
from rmq_pipeline.serving.endpoints import Endpoints
from rmq_pipeline.serving.scraping import Scraping
from rmq_pipeline.serving.serve import _end
from tests.conformance import raw
from tests.conformance.raw import Raw
from tests.conftest import Eventually
from tests.free_address import free_endpoints


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    process.stop(tmp_path / "home")


def test_a_broker_started_again_is_where_it_was(home: Path) -> None:
    first = process.start(home, listening=free_endpoints())
    assert first.grpc is not None
    with Client(home=home) as client, Raw(first.grpc) as connected:
        client.create_topic("t", queues=1)
        assert raw.code(connected("SendMessage", raw.sends(raw.message("t", b"one")))) == "OK"
        assert client.read("t", 0, offset=0, limit=9).column("body").to_pylist() == [b"one"]
        process.stop(home)

        second = process.start(home)

        assert (second.grpc, second.flight) == (first.grpc, first.flight)
        # A client that was connected finds it again by itself.
        call = raw.sends(raw.message("t"))
        answer = connected.stub.SendMessage(
            call, metadata=connected.metadata, timeout=20, wait_for_ready=True
        )
        assert raw.code(answer) == "OK"


def test_a_port_that_is_taken_by_then_is_left(home: Path, tmp_path: Path) -> None:
    first = process.start(home, listening=free_endpoints())
    process.stop(home)
    other = tmp_path / "other"
    try:
        taken = process.start(other, listening=Listening(grpc=first.grpc))
        assert taken.grpc == first.grpc

        second = process.start(home)

        assert second.grpc not in (None, first.grpc)
    finally:
        process.stop(other)


def test_an_encrypted_port_is_kept_and_left_when_it_is_taken(home: Path) -> None:
    first = process.start(home, listening=free_endpoints(tls="self-made"))
    process.stop(home)
    again = process.start(home)
    process.stop(home)

    assert first.grpc_tls is not None
    assert again.grpc_tls == first.grpc_tls

    with socket.create_server(("127.0.0.1", int(first.grpc_tls.rpartition(":")[2]))):
        exchanged = process.start(home)

        assert exchanged.grpc == first.grpc
        assert exchanged.grpc_tls not in (None, first.grpc_tls)


def test_an_endpoint_may_stay_shut(home: Path, eventually: Eventually) -> None:
    endpoint = process.start(home, listening=Listening(grpc="none"))
    log = home / process.LOG_FILE

    assert endpoint.grpc is None
    # It says so once it serves.
    eventually(lambda: "ready " in log.read_text())
    assert f"ready grpc=- flight={endpoint.flight} home={home}" in log.read_text()
    process.stop(home)
    assert process.start(home).grpc is None


def test_a_start_that_fails_at_the_end_lets_home_and_ports_go(tmp_path: Path) -> None:
    home = tmp_path / "not_served"
    # The endpoint cannot replace a folder: the endpoints are open by then.
    (home / "endpoint.json" / "in_the_way").mkdir(parents=True)
    serve = """
import pathlib, socket, sys
from rmq_pipeline.broker import Broker
from rmq_pipeline.flight.flags import Flags, Listening, given
from rmq_pipeline.serving.serve import serve
home = pathlib.Path(sys.argv[1])
any_port = "127.0.0.1:0"
try:
    serve(home, listening=Listening(flight=any_port, grpc=any_port), settings=given())
except IsADirectoryError:
    Broker.open(home).close()
    for address in (Flags.remembered(home).flight, Flags.remembered(home).grpc):
        host, port = address.split(":")
        assert socket.socket().connect_ex((host, int(port))), address
    sys.stdout.write("closed")
"""

    done = subprocess.run(
        [sys.executable, "-c", serve, str(home)], check=False, capture_output=True, text=True
    )

    assert (done.returncode, done.stdout) == (0, "closed"), done.stderr
    # Nothing of the database is left that its library would complain of.
    assert "leaked" not in done.stderr


def test_status_shows_the_route_table(home: Path, tmp_path: Path) -> None:
    table = tmp_path / "routes.toml"
    table.write_text(
        '[brokers]\na = {grpc = "h:1"}\n[topics.t]\ntype = "normal"\nqueues = {a = 2}\n', "utf-8"
    )
    settings = {"route_table": str(table), "broker_name": "a"}
    process.start(home, listening=free_endpoints(), settings=settings)

    with Client(home=home) as client:
        client.create_topic("t", queues=1)
        table.write_text("[brokers]\n", "utf-8")
        shown = client.status()["routes"]

    assert shown["brokers"] == {"a": ["h:1"]}
    assert shown["differences"] == ["Topic t has 1 queues here, 2 in the route table."]
    assert "It has 0 brokers" in shown["fault"]


def test_a_wrong_route_table_is_refused_before_there_is_a_home(home: Path) -> None:
    settings = {"route_table": str(home / "no.toml")}

    with pytest.raises(RocketMQError, match=r"The route table .* cannot be read"):
        process.start(home, listening=free_endpoints(), settings=settings)

    assert not (home / "log").exists()


class Unstoppable:
    """A push that fails to stop, after it looked whether calls were refused."""

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self._look = look

    def shutdown(self) -> None:
        self._look()
        raise ZeroDivisionError


def test_a_push_that_fails_to_stop_keeps_neither_calls_nor_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []
    broker = Broker.open(home)
    flags = Flags.remembered(home, flight="127.0.0.1:0", grpc="none")
    endpoints = Endpoints.open(broker, flags, token="t")
    client = Client(endpoints.flight.address)

    def look() -> None:
        with pytest.raises(BrokerUnavailableError) as error:
            client.create_topic("late")
        refused.append(error.value.message)

    scraping = Scraping(flags)
    scraping._push = Unstoppable(look)  # type: ignore[assignment]
    # The process is pytest's: it goes on, and logs.
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(logging, "shutdown", lambda: None)

    with client, pytest.raises(SystemExit) as ended:
        _end(broker, endpoints, scraping=scraping)

    assert ended.value.code == 0
    assert len(refused) == 1
    assert "stopping" in refused[0]
    Broker.open(home).close()


def test_a_push_that_fails_to_stop_keeps_no_port(home: Path) -> None:
    with Scraping(Flags.remembered(home, metrics="127.0.0.1:0")) as scraping:
        assert scraping.address is not None
        host, port = scraping.address.split(":")
        scraping._push = Unstoppable()  # type: ignore[assignment]

    with socket.socket() as refused:
        assert refused.connect_ex((host, int(port)))


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("stdout", ["/dev/full", "&-"])
def test_a_broker_serves_though_its_stdout_takes_nothing(
    home: Path, stdout: str, unbuffered: str, eventually: Eventually
) -> None:
    said = {"listening": {"flight": "127.0.0.1:0", "grpc": "none"}, "settings": given()}
    command = [sys.executable, "-m", "rmq_pipeline.serving", str(home), json.dumps(said)]
    redirected = ["sh", "-c", f'exec "$@" >{stdout}', "sh", *command]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}

    with subprocess.Popen(redirected, env=environment, stderr=subprocess.PIPE, text=True) as broker:
        try:
            eventually(lambda: process.serving(home) or broker.poll() is not None)
        finally:
            broker.terminate()
        _, err = broker.communicate(timeout=30)

    assert broker.returncode == 0, err
    assert "Traceback" not in err


def test_kept_settings_that_say_the_same_are_left_alone(tmp_path: Path) -> None:
    kept = Flags(tls=("chain.pem", "key.pem"), settings={"delay_levels_ms": [1000]})
    kept.keep(tmp_path)
    file = tmp_path / SETTINGS_FILE
    in_one_line = json.dumps(json.loads(file.read_text()))
    file.write_text(in_one_line)

    Flags.remembered(tmp_path).keep(tmp_path)
    kept.keep(tmp_path)
    assert file.read_text() == in_one_line

    Flags.remembered(tmp_path, upkeep="none").keep(tmp_path)
    assert Flags.remembered(tmp_path).upkeep == "none"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists what a process has loaded")
def test_a_broker_works_without_pandas(home: Path) -> None:
    served = process.start(home)
    with Client(home=home) as client:
        client.create_topic("t", queues=1)
        client.create_group("g")
        client.send("t", pa.table({"body": [b"one"]}))
        client.ack(client.receive("g", "t"))
        assert client.sql("SELECT lag FROM lag").column("lag").to_pylist() == [0]

    loaded = {Path(file.path) for file in psutil.Process(served.pid).memory_maps()}

    # A start with pandas takes 0.3 s longer, and the broker 37 MB more.
    assert any("pyarrow" in file.parts for file in loaded)
    assert not any("pandas" in file.parts for file in loaded)
