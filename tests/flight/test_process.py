"""The broker as a process of its own."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rmq_pipeline import errors
from rmq_pipeline.broker import Broker
from rmq_pipeline.endpoint import LOCK_FILE, Endpoint
from rmq_pipeline.flight import process
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.flags import Flags, Listening
from rmq_pipeline.settings import Settings
from tests.conftest import Eventually
from tests.free_address import free_endpoints

FREE = json.dumps(
    {
        "listening": {"flight": "127.0.0.1:0"},
        "settings": {"log_file_bytes": 1048576, "reserve_bytes": 0},
    }
)
#: As a broker that closes its home, or a notebook: the lock, and no endpoint.
HOLD = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
os.pwrite(lock, str(os.getpid()).encode(), 0)
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(home: Path) -> "Iterator[subprocess.Popen[str]]":
    """A process that has the home open until its stdin is closed."""
    home.mkdir(exist_ok=True)
    command = [sys.executable, "-c", HOLD, str(home / LOCK_FILE)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        yield child


def let_go(child: "subprocess.Popen[str]") -> None:
    assert child.stdin is not None
    child.stdin.close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    home = tmp_path / "home"
    yield home
    process.stop(home)


def log_of(home: Path) -> str:
    return (home / process.LOG_FILE).read_text()


def kill(endpoint: Endpoint) -> None:
    # Before it is killed: the process that started it may end it first.
    broker = psutil.Process(endpoint.pid)
    broker.kill()
    psutil.wait_procs([broker])


def test_started_broker_serves_and_stops(home: Path, eventually: Eventually) -> None:
    endpoint = process.start(home)

    assert process.start(home) == process.serving(home) == endpoint
    # It says so once it serves.
    eventually(lambda: "ready " in log_of(home))
    assert f"ready grpc={endpoint.grpc} flight={endpoint.flight} home={home}" in log_of(home)
    with Client(home=home, retry_s=0) as client:
        assert client.ping() == {"pid": endpoint.pid}
        assert client.status()["pid"] == endpoint.pid

    assert process.stop(home) == endpoint
    assert process.stop(home) is None
    assert process.serving(home) is None
    assert not psutil.pid_exists(endpoint.pid)
    assert Endpoint.read(home) is None
    assert "Traceback" not in log_of(home)


def test_broker_does_not_end_with_its_starter(home: Path) -> None:
    code = "import sys; from rmq_pipeline.flight.client import Client; "
    code += "Client(home=sys.argv[1], autostart=True).ping()"
    subprocess.run([sys.executable, "-c", code, str(home)], check=True)

    endpoint = process.serving(home)

    assert endpoint is not None
    assert os.getsid(endpoint.pid) == endpoint.pid


def test_several_starters_end_in_one_broker(home: Path, eventually: Eventually) -> None:
    with ThreadPoolExecutor(4) as pool:
        endpoints = list(pool.map(lambda _: process.start(home), range(4)))

    assert len(set(endpoints)) == 1
    eventually(lambda: "ready " in log_of(home))
    assert log_of(home).count("ready ") == 1


def test_ports_and_flags_are_kept(home: Path) -> None:
    picked = Listening(grpc_tls="127.0.0.1:0", tls="self-made")
    first = process.start(home, listening=picked, upkeep="none", flush="async")
    process.stop(home)

    kept = Flags.remembered(home)
    assert (kept.flight, kept.grpc, kept.grpc_tls) == (first.flight, first.grpc, first.grpc_tls)
    # Another test may have a port by now that was picked for this one.
    second = process.start(home, listening=free_endpoints(tls="self-made"))
    process.stop(home)
    third = process.start(home)

    assert third.pid != second.pid
    assert (third.flight, third.upkeep, third.flush) == (second.flight, "none", "async")


def test_kept_port_that_is_taken_is_replaced(home: Path) -> None:
    first = process.start(home, listening=free_endpoints())
    process.stop(home)
    with socket.create_server(("127.0.0.1", int(first.flight.split(":")[1]))):
        second = process.start(home)

    assert second.flight != first.flight
    assert process.serving(home) == second


def test_killed_broker_is_found_again_after_it_was_started_again(home: Path) -> None:
    with Client(home=home, autostart=True) as client, ThreadPoolExecutor(1) as pool:
        first = process.serving(home)
        assert first is not None
        client.ensure_topic("t")
        kill(first)
        with pytest.raises(errors.BrokerUnavailableError):
            client.create_topic("u")
        call = pool.submit(client.describe_topic, "t")

        second = process.start(home)

        assert call.result(30)["name"] == "t"
        assert client.ping() == {"pid": second.pid}


def test_broker_that_cannot_start_says_why(home: Path) -> None:
    with pytest.raises(errors.OperatorError, match="beyond loopback"):
        process.start(home, listening=Listening(flight="0.0.0.0:0"))


def test_home_open_in_a_process_without_an_endpoint_is_locked(home: Path) -> None:
    small = Settings(log_file_bytes=1024 * 1024, reserve_bytes=0)
    with Broker.open(home, settings=small), pytest.raises(errors.HomeLockedError):
        process.start(home, timeout_s=15)  # it waits all the time for the home


def test_a_start_waits_for_the_broker_that_closes_the_home(
    home: Path, eventually: Eventually
) -> None:
    with holder(home) as closing, ThreadPoolExecutor(1) as pool:
        starting = pool.submit(process.start, home)
        eventually(lambda: (home / process.LOG_FILE).exists() and "is open in" in log_of(home))
        let_go(closing)

        started = starting.result(60)

    assert process.serving(home) == started
    eventually(lambda: "ready " in log_of(home))
    assert log_of(home).count("ready ") == 1


def test_stop_waits_for_the_process_that_closes_the_home(home: Path) -> None:
    with holder(home) as closing, ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(process.stop, home)
        with pytest.raises(TimeoutError):
            stopping.result(0.5)
        let_go(closing)

        assert stopping.result(30) == process.Ended(closing.pid)

    assert process.stop(home) is None


def test_stop_of_a_broker_that_is_closing_returns_when_the_home_is_free(
    home: Path, eventually: Eventually
) -> None:
    endpoint = process.start(home)
    os.kill(endpoint.pid, signal.SIGTERM)
    eventually(lambda: Endpoint.read(home) is None)

    stopped = process.stop(home)

    # It may have let the home go before stop looked.
    assert stopped in (None, process.Ended(endpoint.pid))
    assert not process.is_locked(home)


def test_stop_ends_a_broker_that_is_about_to_serve(home: Path, eventually: Eventually) -> None:
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(process.start, home)
        # It is written under the lock, and long before the endpoint.
        eventually((home / "format").exists)

        stopped = process.stop(home)

        assert isinstance(stopped, Endpoint)
        assert not psutil.pid_exists(stopped.pid)
        # Whether it has seen the broker serve or end is a matter of luck.
        assert isinstance(starting.exception(60), errors.OperatorError | None)


def test_stop_names_the_process_that_keeps_the_home_open(home: Path) -> None:
    told: list[str] = []
    with holder(home) as keeping:
        with pytest.raises(errors.OperatorError, match=f"open in process {keeping.pid}, which"):
            process.stop(home, timeout_s=0.1, tell=told.append)
        let_go(keeping)

    # Once, and not only when it has given up.
    assert [f"is open in process {keeping.pid}" in sentence for sentence in told] == [True]


def test_stop_of_a_home_that_this_process_has_open_is_refused_at_once(home: Path) -> None:
    with Broker.open(home, upkeep="none") as broker:
        with pytest.raises(errors.ConflictError, match=f"open in this process, {os.getpid()}"):
            process.stop(home, timeout_s=60)

        broker.create_topic("plain")

    assert process.stop(home) is None


def test_what_a_killed_broker_has_left_is_no_broker(home: Path) -> None:
    kill(process.start(home))

    assert Endpoint.read(home) is not None
    assert process.stop(home) is None


def test_interrupted_broker_leaves_cleanly(home: Path) -> None:
    command = [sys.executable, "-m", "rmq_pipeline.serving", str(home), FREE]
    broker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert broker.stdout is not None
    ready = broker.stdout.readline()

    broker.send_signal(signal.SIGINT)
    rest, said = broker.communicate(timeout=30)

    # One that does not start says why.
    assert re.match(r"ready grpc=127\.0\.0\.1:\d+ flight=127\.0\.0\.1:\d+ ", ready), said
    assert rest == ""
    assert broker.returncode == 0, said
    assert Endpoint.read(home) is None


def test_a_password_in_log_store_never_reaches_a_command_line(home: Path) -> None:
    with pytest.raises(errors.RequestError, match="PGPASSWORD"):
        process.start(home, settings={"log_store": "postgresql://rmq:sec#ret@127.0.0.1/log"})

    assert not home.exists()
