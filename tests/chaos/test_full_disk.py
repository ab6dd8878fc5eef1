"""A full disk: sends are refused, receivers go on from the reserve, nothing answered is lost."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import RawIOBase
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.broker.work import engine
from rmq_pipeline.cli.supervisor import Supervisor
from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.errors import StoreFullError
from rmq_pipeline.flight import process
from rmq_pipeline.flight.client import Client
from rmq_pipeline.flight.flags import SETTINGS_FILE, Flags, Listening
from rmq_pipeline.settings import Settings
from tests.cli.conftest import RMQ
from tests.conftest import Eventually
from tests.free_address import free_endpoints

pytestmark = pytest.mark.chaos

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
DISK_MIB = 96
SETTINGS = Settings(
    log_file_bytes=4 * MIB,
    reserve_bytes=16 * MIB,
    duckdb_memory_bytes=64 * MIB,
    index_cache_rows=100_000,
)
#: The same for a broker of its own process.
SMALL = SETTINGS.model_dump(exclude_unset=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(autouse=True)
def ballast(disk: Path) -> Path:
    """Something else that takes half of the disk, until it is deleted."""
    path = disk / "ballast"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, DISK_MIB * MIB // 2)
    return path


@pytest.fixture
def broker(disk: Path) -> Iterator[Broker]:
    with Broker.open(disk / "home", upkeep="none", settings=SETTINGS) as broker:
        broker.create_topic("plain", queues=2)
        broker.create_group("readers", max_attempts=1000)
        yield broker


def messages(n: int = 200) -> pa.Table:
    return pa.table({"body": [os.urandom(1024) for _ in range(n)]})


def send_until_full(broker: Broker | Client) -> dict[str, bytes]:
    """Send until the disk is full: message_id -> body of what was answered."""
    sent: dict[str, bytes] = {}
    while True:
        some = messages()
        try:
            ids = broker.send("plain", some)["message_id"].to_pylist()
        except StoreFullError:
            return sent
        sent.update(zip(ids, some["body"].to_pylist(), strict=True))


def stored(broker: Broker) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for queue_id in range(2):
        table = broker.read("plain", queue_id, offset=0, limit=1_000_000)
        found.update(zip(table["message_id"].to_pylist(), table["body"].to_pylist(), strict=True))
    return found


def lease_until_full(broker: Broker) -> int:
    """Receive without settling until even that is refused; how many messages that were."""
    taken = 0
    while True:
        try:
            got = broker.receive("readers", "plain", limit=10_000, invisible_duration_ms=1)
        except StoreFullError:
            return taken
        taken += got.num_rows


def receive_and_ack(broker: Broker | Client, limit: int) -> list[str]:
    got = broker.receive("readers", "plain", limit=limit)
    broker.ack(got)
    ids: list[str] = got["message_id"].to_pylist()
    return ids


def test_receivers_go_on_and_sends_resume_when_there_is_room(
    broker: Broker, disk: Path, ballast: Path, eventually: Eventually
) -> None:
    sent = send_until_full(broker)
    log = broker.engine.log

    received: list[str] = []
    while some := receive_and_ack(broker, 10):
        received.extend(some)
        with pytest.raises(StoreFullError):
            broker.send("plain", messages(1))

    assert sorted(received) == sorted(sent)
    assert stored(broker) == sent
    assert broker.engine.log is log, "a refusal has made the broker recover"
    assert broker.sql("SELECT sum(lag)::BIGINT AS lag FROM lag")["lag"].to_pylist() == [0]

    ballast.unlink()
    more: list[str] = []

    def sends_again() -> bool:
        try:
            more.extend(broker.send("plain", messages(1))["message_id"].to_pylist())
        except StoreFullError:
            return False
        return True

    eventually(sends_again)
    assert receive_and_ack(broker, 10) == more
    broker.close()
    with Broker.open(disk / "home", upkeep="none", settings=SETTINGS) as again:
        assert stored(again).keys() == sent.keys() | set(more)
        assert receive_and_ack(again, 10) == []


def test_everything_is_refused_when_the_reserve_is_used_up(
    broker: Broker, ballast: Path, eventually: Eventually
) -> None:
    sent = send_until_full(broker)

    taken = [lease_until_full(broker) for _ in range(2)]

    assert taken[0]
    ballast.unlink()
    received: list[str] = []

    def all_received() -> bool:
        try:
            received.extend(receive_and_ack(broker, 1000))
        except StoreFullError:
            return False
        return set(received) == sent.keys()

    eventually(all_received)
    assert len(received) == len(sent)
    assert stored(broker) == sent


@pytest.mark.parametrize("is_freed", [True, False])
def test_closing_while_dispatch_waits_for_space_loses_nothing(
    disk: Path,
    ballast: Path,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_freed: bool,
) -> None:
    monkeypatch.setattr(engine, "_FULL_WAIT_S", 3600.0)
    with Broker.open(disk / "home", upkeep="none", settings=SETTINGS) as broker:
        broker.create_topic("plain", queues=2)
        broker.create_group("readers", max_attempts=1000)
        sent = send_until_full(broker)
        lease_until_full(broker)

        def dispatch_waits() -> bool:
            """True once a full disk has stopped dispatch, and no part of the reserve is left."""
            fill(disk)
            with suppress(StoreFullError):
                broker.receive("readers", "plain", limit=1, invisible_duration_ms=1)
            warned = [some.created for some in caplog.records if "cannot write" in some.msg]
            is_over = bool(warned) and time.time() - warned[-1] > 2
            return is_over and broker.engine.dispatcher.behind_bytes > 0

        eventually(dispatch_waits)
        if is_freed:
            ballast.unlink()
            (disk / "filling").unlink()

    assert "Dispatch has failed" not in caplog.text
    assert ("the next start dispatches" in caplog.text) is not is_freed
    ballast.unlink(missing_ok=True)
    with Broker.open(disk / "home", upkeep="none", settings=SETTINGS) as again:
        assert stored(again) == sent


def test_a_home_on_a_full_disk_opens(broker: Broker, disk: Path) -> None:
    sent = send_until_full(broker)
    broker.close()

    with Broker.open(disk / "home", upkeep="none", settings=SETTINGS) as again:
        assert stored(again) == sent
        more = send_until_full(again)
        received = receive_and_ack(again, 10_000)

    assert received
    assert set(received) <= sent.keys() | more.keys()


@contextmanager
def served(home: Path) -> "Iterator[subprocess.Popen[str]]":
    """``rmq broker`` with a port of its own choice, from its line until it is killed."""
    command = [RMQ, "broker", "--home", str(home), "--flight", "127.0.0.1:0", "--grpc", "none"]
    command += [f"--set={name}={value}" for name, value in SMALL.items()]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as broker:
        assert broker.stdout is not None
        assert broker.stderr is not None
        try:
            assert broker.stdout.readline().startswith("ready "), broker.stderr.read()
            yield broker
        finally:
            broker.kill()


def fill(disk: Path) -> None:
    """Take what is left of a disk, to its last byte."""
    page = bytes(4096)

    def write_on(file: RawIOBase) -> None:
        while True:
            file.write(page)

    with (disk / "filling").open("wb", buffering=0) as file, pytest.raises(OSError, match="space"):
        write_on(file)


def killed_on_a_full_disk(disk: Path) -> list[str]:
    """A home whose broker was killed when it had used up the disk; what it had answered."""
    home = disk / "home"
    with served(home), Client(home=home) as client:
        client.create_topic("plain", queues=2)
        client.create_group("readers", max_attempts=1000)
        sent = send_until_full(client)
    fill(disk)
    return sorted(sent)


def endpoint_of(home: Path) -> Endpoint:
    found = Endpoint.read(home)
    assert found is not None
    return found


def drain(client: Client) -> list[str]:
    received: list[str] = []
    while some := receive_and_ack(client, 1000):
        received.extend(some)
    return sorted(received)


def test_a_killed_broker_starts_again_on_a_full_disk(disk: Path) -> None:
    home = disk / "home"
    sent = killed_on_a_full_disk(disk)

    with served(home) as again, Client(home=home) as client:
        flight = endpoint_of(home).flight
        assert drain(client) == sent
        with pytest.raises(StoreFullError):
            client.send("plain", messages(1))
        again.terminate()
        rest, said = again.communicate(timeout=60)

    assert (again.returncode, rest) == (0, ""), said
    # It was asked for another port, and the next start finds it there: a part of the reserve went
    # to what the home remembers.
    assert "freeing a part of the reserve" in said
    assert Flags.remembered(home).flight == flight


def test_a_supervised_broker_that_is_killed_on_a_full_disk_is_as_it_was(
    disk: Path, eventually: Eventually
) -> None:
    home = disk / "home"
    killed_on_a_full_disk(disk)
    assert Flags.remembered(home).upkeep == "self"
    told: list[str] = []
    settings = {"seal_after_ms": 1}

    # Neither upkeep nor settings are those that the home has.
    with Supervisor(home, free_endpoints(), settings=settings, tell=told.append) as supervisor:
        first = supervisor.endpoint
        fill(disk)
        os.kill(first.pid, signal.SIGKILL)
        eventually(lambda: supervisor.restarts == 1, within_s=60)

        again = supervisor.endpoint
        with Client(home=home) as client:
            found = client.status()["settings"]

    assert (again.upkeep, again.flight) == ("dagster", first.flight)
    assert (found["seal_after_ms"], found["log_file_bytes"]) == (1, 4 * MIB)
    assert "restarted as process" in told[0]


def test_a_killed_broker_is_started_again_by_its_client_on_a_full_disk(disk: Path) -> None:
    home = disk / "home"
    sent = killed_on_a_full_disk(disk)
    before = (home / SETTINGS_FILE).stat().st_ino

    # What it says goes to broker.log, on the same disk.
    process.start(home, settings={})
    try:
        with Client(home=home) as client:
            assert drain(client) == sent
    finally:
        process.stop(home)

    assert (home / SETTINGS_FILE).stat().st_ino == before


def test_a_certificate_is_made_on_a_full_disk(disk: Path) -> None:
    home = disk / "home"
    sent = killed_on_a_full_disk(disk)

    process.start(home, listening=Listening(tls="self-made"), settings={})
    try:
        with Client(home=home) as client:
            assert drain(client) == sent
    finally:
        process.stop(home)

    assert (home / "tls" / "certificate.pem").exists()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_of_tests_ends_on_a_full_disk_and_says_so(disk: Path, workers: str) -> None:
    environment = {**os.environ, "TMPDIR": str(disk), "PYTEST_DEBUG_TEMPROOT": str(disk)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", workers]

    run = subprocess.run(
        [*command, "tests/test_failure.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 1
    assert re.search(r"The disk is full: 4\d MiB are left", run.stdout)
    assert "passed" not in run.stdout
    assert [path.name for path in disk.iterdir() if path.name.startswith("rmq-tests-")] == []
