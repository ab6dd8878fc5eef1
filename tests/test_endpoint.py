import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rmq_pipeline import durable_files
from rmq_pipeline.endpoint import FILE_NAME, Endpoint, default_home, stamp


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    return Endpoint(
        pid=os.getpid(),
        started_at_ms=time.time_ns() // 1_000_000,
        token="t",
        flight="127.0.0.1:1",
        grpc=None,
        home=str(tmp_path),
        upkeep="self",
        flush="sync",
    )


def test_endpoint_is_read_as_written(endpoint: Endpoint, tmp_path: Path) -> None:
    assert Endpoint.read(tmp_path) is None

    endpoint.write()

    assert Endpoint.read(tmp_path) == endpoint
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_only_the_owner_may_read_the_token(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.write()

    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600


def test_a_new_endpoint_changes_the_stamp(endpoint: Endpoint, tmp_path: Path) -> None:
    stamps = [stamp(tmp_path)]
    for _ in range(2):
        endpoint.write()
        stamps.append(stamp(tmp_path))

    assert len(set(stamps)) == 3


def test_only_its_own_endpoint_is_removed(endpoint: Endpoint, tmp_path: Path) -> None:
    later = replace(endpoint, token="later")
    later.write()

    endpoint.remove()
    assert Endpoint.read(tmp_path) == later

    later.remove()
    assert Endpoint.read(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"pid": 1}', "\0"])
def test_endpoint_that_makes_no_sense_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(text)

    assert Endpoint.read(tmp_path) is None


def test_fields_of_a_newer_version_are_ignored(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.write()
    path = tmp_path / FILE_NAME
    path.write_bytes(
        durable_files.dump_json({**durable_files.load_json(path.read_bytes()), "new": 1})
    )

    assert Endpoint.read(tmp_path) == endpoint


def test_process_that_ended_is_not_alive(endpoint: Endpoint) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    of_process = replace(endpoint, pid=process.pid, started_at_ms=time.time_ns() // 1_000_000)
    assert of_process.is_alive()

    process.communicate()

    assert not of_process.is_alive()


def test_process_that_is_younger_than_the_endpoint_is_another(endpoint: Endpoint) -> None:
    assert endpoint.is_alive()
    assert not replace(endpoint, started_at_ms=1_000).is_alive()


def test_home_is_named_or_that_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = tmp_path / "project" / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    monkeypatch.delenv("RMQ_HOME", raising=False)
    assert default_home() == below / ".rmq"

    (tmp_path / "project" / "pyproject.toml").touch()
    assert default_home() == tmp_path / "project" / ".rmq"

    monkeypatch.setenv("RMQ_HOME", "elsewhere")
    assert default_home() == Path("elsewhere")
