"""``rmq broker``, ``rmq stop``, ``rmq status`` and ``rmq verify``."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from typing_extensions import override

from rmq_pipeline.broker.work.verification import Verified
from rmq_pipeline.cli.broker import _with_progress
from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.handling import sink as sinks
from rmq_pipeline.lake import manifest
from tests.broker.sealed_home import messages, open_broker, seal_all
from tests.cli.conftest import RMQ, Rmq, Served, end, process, serve
from tests.flight.test_process import holder, let_go
from tests.free_address import free_endpoints

PORT = r"127\.0\.0\.1:\d+"


def test_prints_one_line_when_it_serves(home: Path) -> None:
    served = serve(home)

    rest = end(served)

    assert re.fullmatch(rf"ready grpc={PORT} flight={PORT} home={home}\n", served.ready)
    assert rest == ""
    assert served.process.returncode == 0


def test_status_tells_the_port_that_was_picked(rmq: Rmq, served: Served) -> None:
    status = rmq("status", "--json").json

    assert f"flight={status['flight']} " in served.ready
    assert f"grpc={status['grpc']} " in served.ready
    assert status["pid"] == served.process.pid
    assert status["home"] == str(served.home)
    assert status["upkeep"] == "self"
    assert "token" not in status
    assert status["flight"] in rmq("status").text


def test_status_does_without_a_home_that_cannot_be_read(
    rmq: Rmq, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = rmq("status", "--json").json

    def refuse(home: Path) -> None:
        raise PermissionError(13, "Permission denied", str(home / "endpoint.json"))

    # No mode of a file keeps root from reading it.
    monkeypatch.setattr(Endpoint, "read", refuse)
    of_another_user = rmq("status", "--flight", status["flight"], "--json").json

    assert of_another_user["home"] == status["home"]
    assert "flight" not in of_another_user
    assert rmq("status", "--flight", status["flight"]).code == 0


def test_a_second_broker_of_a_home_is_told_of_the_first(served: Served) -> None:
    second = process(RMQ, "broker", "--home", str(served.home), "--flight", "127.0.0.1:0")

    assert second.returncode == 1
    assert second.stdout == ""
    assert second.stderr.startswith("HomeLockedError: ")
    assert str(served.process.pid) in second.stderr


def test_stop_ends_the_broker_and_keeps_its_flags(
    no_broker: Rmq, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RMQ_HOME", str(home))
    endpoints = free_endpoints()
    where = ("--flight", str(endpoints.flight), "--grpc", str(endpoints.grpc))
    served = serve(home, *where, "--upkeep", "dagster", "--flush", "async")

    stopped = no_broker("stop", "--json").json
    served.process.communicate(timeout=30)

    assert stopped == {"stopped": True, "pid": served.process.pid, "home": str(home)}
    assert served.process.returncode == 0
    again = subprocess.Popen([RMQ, "broker"], stdout=subprocess.PIPE, text=True)
    assert again.stdout is not None
    assert again.stdout.readline() == served.ready
    status = no_broker("status", "--json").json
    assert (status["upkeep"], status["flush"]) == ("dagster", "async")
    again.terminate()
    again.communicate(timeout=30)


def test_settings_are_kept_in_the_home_and_told(
    no_broker: Rmq, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RMQ_HOME", str(home))
    file = tmp_path / "rmq.toml"
    file.write_text("log_file_bytes = 2097152\nreserve_bytes = 1048576\n")
    end(serve(home, "--settings", str(file), "--set", "delay_levels_ms=1000,2000"))
    monkeypatch.delenv("RMQ_SETTINGS")

    served = serve(home, "--set", "transaction_check_max=3")
    in_force = no_broker("status", "--json").json["settings"]
    told = no_broker("status").text
    end(served)

    assert in_force["log_file_bytes"] == 2 * 1024 * 1024
    assert in_force["delay_levels_ms"] == [1000, 2000]
    assert in_force["transaction_check_max"] == 3
    assert in_force["seal_after_ms"] == 600_000
    assert re.search(r"^settings\.transaction_check_max +3 *$", told, re.MULTILINE)
    assert "seal_after_ms" not in told
    assert sum(path.stat().st_size for path in (home / "log").iterdir()) < 4 * 1024 * 1024


def test_a_wrong_setting_is_named_before_anything_is_made(home: Path) -> None:
    for command in ("broker", "up"):
        told = process(RMQ, command, "--home", str(home), "--set", "reserve_bytes=much")

        assert told.returncode == 1
        assert told.stderr.startswith("RequestError: Setting reserve_bytes is 'much': ")
        assert told.stderr.count("\n") == 1
    assert not home.exists()


def test_stop_without_a_broker_is_done(no_broker: Rmq) -> None:
    told = no_broker("stop")

    assert told.code == 0
    assert "No broker serves" in told.text
    assert no_broker("stop", "--json").json["stopped"] is False


def test_stop_says_at_once_whom_it_waits_for(home: Path) -> None:
    command, pipe = [RMQ, "stop", "--home", str(home), "--json"], subprocess.PIPE
    with (
        holder(home) as keeping,
        subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as stopping,
    ):
        assert stopping.stderr is not None
        assert f"{home} is open in process {keeping.pid}" in stopping.stderr.readline()
        let_go(keeping)
        # What has ended is there until its parent has looked.
        keeping.wait(30)
        out, err = stopping.communicate(timeout=30)

    assert (stopping.returncode, json.loads(out)["pid"], err) == (0, keeping.pid, "")


def test_a_killed_broker_is_no_broker(
    no_broker: Rmq, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RMQ_HOME", str(home))
    served = serve(home)
    os.kill(served.process.pid, signal.SIGKILL)
    served.process.communicate(timeout=30)

    told = no_broker("status")

    assert told.code == 1
    assert "No broker serves" in told.err


def test_a_port_0_in_the_environment_means_that_of_the_home(
    rmq: Rmq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RMQ_FLIGHT", "127.0.0.1:0")

    assert rmq("topic", "list").code == 0


def test_an_address_finds_the_broker_without_its_home(
    rmq: Rmq, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flight = rmq("status", "--json").json["flight"]
    monkeypatch.setenv("RMQ_HOME", str(tmp_path))

    assert rmq("topic", "list", "--flight", flight).code == 0
    monkeypatch.setenv("RMQ_FLIGHT", flight)
    assert rmq("topic", "list").code == 0


def test_a_home_that_cannot_be_made_is_one_line() -> None:
    told = process(RMQ, "broker", "--home", "/dev/null/home")

    assert told.returncode == 1
    assert told.stderr.count("\n") == 1
    assert "/dev/null/home" in told.stderr


def test_the_log_is_json_when_that_was_said(tmp_path: Path) -> None:
    home = tmp_path / "json"
    command = [RMQ, "broker", "--home", str(home), "--flight", "127.0.0.1:0", "--grpc", "none"]
    command += ["--log-format", "json", "--log-level", "info"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()

    process.terminate()
    _, said = process.communicate(timeout=30)

    (stopping,) = [
        each for each in map(json.loads, said.splitlines()) if "stopping" in each["message"]
    ]
    assert stopping["level"] == "info"
    assert stopping["logger"] == "rmq_pipeline.serving.serve"


@pytest.fixture
def sealed(home: Path) -> Path:
    with open_broker(home, snapshot_events=1) as broker:
        broker.create_topic("orders", queues=1)
        broker.send("orders", messages(50, body_bytes=100))
        seal_all(broker)
    return home


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 0x10
    with path.open("r+b") as file:
        file.write(content)


def test_a_sound_home_has_no_damage(rmq: Rmq, sealed: Path) -> None:
    said = rmq("verify", "--home", str(sealed), "--json").json

    assert said["damaged"] == []
    assert said["place"] == str(sealed)
    kinds = {"archive", "database", "events", "format", "index", "log", "manifest", "segment"}
    assert said["kinds"].keys() >= {*kinds, "snapshot"}
    assert said["files"] == sum(said["kinds"].values())


@pytest.mark.parametrize(
    ("pattern", "byte", "kind"),
    [
        ("topics/**/*.kept", 2000, "segment"),
        ("topics/**/_manifest.json", 60, "manifest"),
        ("events/0*.parquet", 30, "events"),
        ("log/*.log", 4096 + 100, "log"),
        ("log/*.log", b"49:", "log"),  # a body
        ("archive.json", 20, "archive"),
        ("state.duckdb", 4096 * 3 + 100, "database"),
    ],
)
def test_a_damaged_file_is_named_with_what_to_do(
    rmq: Rmq, sealed: Path, pattern: str, byte: int | bytes, kind: str
) -> None:
    (path,) = sealed.glob(pattern)
    flip(path, byte if isinstance(byte, int) else path.read_bytes().index(byte))

    told = rmq("verify", "--home", str(sealed), "--json")

    assert told.code == 1
    (damaged,) = json.loads(told.text)["damaged"]
    assert str(path).endswith(damaged["file"])
    assert damaged["kind"] == kind
    assert damaged["damage"]
    assert damaged["remedy"]


def test_a_damaged_row_of_the_database_is_named(rmq: Rmq, sealed: Path) -> None:
    path = sealed / "state.duckdb"
    with duckdb.connect(path, read_only=True) as database:
        stored = "SELECT min(block_id) FROM pragma_storage_info('store.topics') WHERE block_id >= 0"
        [(block,)] = database.sql(stored).fetchall()
    # Opening the database does not read it.
    flip(path, 3 * 4096 + block * 256 * 1024 + 100)

    told = rmq("verify", "--home", str(sealed), "--json")

    assert [each["kind"] for each in json.loads(told.text)["damaged"]] == ["database"]


def test_a_file_that_is_gone_is_named(rmq: Rmq, sealed: Path) -> None:
    (segment,) = sealed.glob("topics/**/*.kept")
    segment.unlink()

    told = rmq("verify", "--home", str(sealed))

    assert told.code == 1
    assert "it is missing" in told.text


def test_an_open_home_is_refused(rmq: Rmq, sealed: Path) -> None:
    with open_broker(sealed):
        told = rmq("verify", "--home", str(sealed))

    assert told.code == 1
    assert "rmq stop" in told.err


def test_what_is_no_home_is_refused(rmq: Rmq, tmp_path: Path) -> None:
    assert "is not the home of a broker" in rmq("verify", "--home", str(tmp_path)).err


def test_a_damaged_file_of_a_sink_is_named(rmq: Rmq, tmp_path: Path) -> None:
    rows = pa.table({"n": range(1000), "at": [0] * 1000})
    files = sinks.stage(tmp_path, rows, partition_time="at", epoch=1, batch=1)
    sinks.publish_manifest(tmp_path, files)
    assert rmq("verify", "--sink", str(tmp_path)).code == 0
    (path,) = manifest.read(tmp_path).files["path"].to_pylist()

    flip(tmp_path / path, 100)

    told = rmq("verify", "--sink", str(tmp_path), "--json")
    assert told.code == 1
    assert [each["file"] for each in json.loads(told.text)["damaged"]] == [path]


class Counting(int):
    """A number of bytes that counts how often it is added."""

    added = 0

    @override
    def __radd__(self, other: int) -> int:
        Counting.added += 1
        return int(self) + other


def test_the_bar_costs_the_same_for_every_file() -> None:
    files = [Verified("log", "log", Counting(1)) for _ in range(200)]

    assert len(_with_progress(iter(files))) == 200
    assert Counting.added == 200
