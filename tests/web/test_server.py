"""The page's server: its addresses, and the command ``rmq ui``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rmq_pipeline.errors import BrokerUnavailableError, RequestError
from rmq_pipeline.flight.server import FlightServer
from rmq_pipeline.web.server import PageServer, Where
from tests.cli.conftest import RMQ
from tests.incident_night import Night
from tests.web.conftest import Visitor

if TYPE_CHECKING:
    from collections.abc import Iterator

PASSWORD = "correct-horse-battery"


def test_beyond_loopback_the_broker_needs_users(night: Night) -> None:
    with FlightServer(night.broker, access=night.broker.access) as flight:
        connect = Where(flight.address).connect
        with pytest.raises(RequestError, match="beyond loopback"):
            PageServer(connect, "0.0.0.0:0")
        night.broker.create_user("root", password=PASSWORD, type="super")

        with PageServer(connect, "0.0.0.0:0") as page:
            visitor = Visitor(page.url, {"host": "rmq.example.com"})
            assert visitor.get("/").headers["location"] == "/sign-in"

    with pytest.raises(BrokerUnavailableError):
        PageServer(Where("127.0.0.1:1").connect, "0.0.0.0:0")


def test_a_port_that_is_taken_is_refused_with_the_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"

        with pytest.raises(RequestError, match=f"by process {os.getpid()} "):
            PageServer(Where("127.0.0.1:1").connect, address)


@pytest.fixture
def ui(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """``rmq ui`` beside a home that has no broker yet."""
    command = [RMQ, "ui", "--home", str(tmp_path / "home"), "--listen", "127.0.0.1:0"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield started
    started.kill()
    started.communicate(timeout=30)


@pytest.mark.slow
def test_the_page_outlives_its_broker(ui: subprocess.Popen[str], tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    assert ui.stdout is not None
    visitor = Visitor(ui.stdout.readline().split()[1])

    away = visitor.get("/")
    assert (away.status, "No broker serves" in away.text) == (503, True)

    command = [RMQ, "broker", "--home", home, "--flight", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    for _ in range(2):
        broker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert broker.stdout is not None
        broker.stdout.readline()
        assert "No consumer group exists" in visitor.get("/").text
        broker.kill()
        broker.communicate(timeout=30)

    assert visitor.get("/").status == 503
    ui.send_signal(signal.SIGINT)
    assert ui.wait(30) == 0
