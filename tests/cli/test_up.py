"""``rmq up``: broker and Dagster together."""

import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rmq_pipeline.endpoint import Endpoint
from tests.cli.conftest import RMQ, process
from tests.conftest import Eventually
from tests.free_address import free_endpoints, free_port

pytestmark = [pytest.mark.slow, pytest.mark.dagster]

#: A project that has no pipeline yet.
EMPTY = """
import rmq_pipeline.dagster as rmq

defs = rmq.definitions(pipelines=[])
"""


@pytest.fixture
def up(home: Path, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    endpoints = free_endpoints(tls="self-made")
    command = [RMQ, "up", "--home", str(home), "--port", str(free_port())]
    command += ["--dagster-home", str(tmp_path / "dagster_home"), "--tls", "self-made"]
    command += ["--flight", str(endpoints.flight), "--grpc", str(endpoints.grpc)]
    command += ["--grpc-tls", str(endpoints.grpc_tls), "--ui", "127.0.0.1:0"]
    command += ["-m", "empty.definitions", "-d", str(tmp_path)]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "definitions.py").write_text(EMPTY)
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield started
    if started.poll() is None:
        started.terminate()
    started.communicate(timeout=60)


def lines_until(up: "subprocess.Popen[str]", start: str) -> str:
    """The first line that begins like this."""
    assert up.stdout is not None
    return next(line for line in up.stdout if line.startswith(start))


def endpoint(home: Path) -> Endpoint:
    found = Endpoint.read(home)
    assert found is not None
    return found


def test_up_keeps_both_running_until_ctrl_c(
    up: "subprocess.Popen[str]", home: Path, eventually: Eventually
) -> None:
    assert up.stdout is not None
    assert "empty.definitions" in lines_until(up, "project")
    assert "has no pipelines" in up.stdout.readline()
    url = lines_until(up, "Dagster  http").split()[1]
    with urllib.request.urlopen(f"{url}/server_info") as answer:
        assert answer.status == 200
    page = lines_until(up, "page ").split()[1]
    with urllib.request.urlopen(page) as answer:
        assert url in answer.read().decode()
    first = endpoint(home)
    assert first.upkeep == "dagster"
    assert first.certificate
    assert first.grpc_tls

    os.kill(first.pid, signal.SIGKILL)

    assert "restarted as process" in lines_until(up, "The broker died")
    assert process(RMQ, "status", "--home", str(home)).returncode == 0
    assert (endpoint(home).grpc_tls, endpoint(home).certificate) == (
        first.grpc_tls,
        first.certificate,
    )
    children = psutil.Process(up.pid).children(recursive=True)

    up.send_signal(signal.SIGINT)

    rest, _ = up.communicate(timeout=60)
    assert up.returncode == 0
    assert "Stopping" in rest
    assert Endpoint.read(home) is None
    eventually(lambda: not any(child.is_running() for child in children))


def test_up_refuses_a_broker_with_another_upkeep(home: Path, tmp_path: Path) -> None:
    command = [RMQ, "broker", "--home", str(home), "--flight", "127.0.0.1:0"]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    other.stdout.readline()

    told = process(RMQ, "up", "--home", str(home), "--dagster-home", str(tmp_path / "d"))

    assert told.returncode == 1
    assert "upkeep self" in told.stderr
    assert other.poll() is None
    other.terminate()
    other.communicate(timeout=30)
