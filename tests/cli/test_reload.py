"""``rmq up --reload``: changed code is loaded, and broken code is not."""

import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmq_pipeline.orchestration.code_reload import Sources
from rmq_pipeline.orchestration.dev_server import DevServer
from rmq_pipeline.orchestration.graphql import GraphQL
from rmq_pipeline.orchestration.project import CodeLocation
from tests.cli.conftest import RMQ, process
from tests.conftest import Eventually
from tests.free_address import free_port

pytestmark = [pytest.mark.slow, pytest.mark.dagster]

CODE = """import dagster as dg

from rmq_pipeline.dagster import definitions


@dg.asset
def {name}() -> None:
    pass


defs = dg.Definitions.merge(dg.Definitions(assets=[{name}]), definitions([]))
"""
_ASSETS = "{ assetNodes { assetKey { path } } }"


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A project with one asset."""
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "definitions.py").write_text(CODE.format(name="first"))
    return folder


@pytest.fixture
def up(home: Path, shop: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [RMQ, "up", "--home", str(home), "--port", str(free_port()), "--reload"]
    command += ["--flight", "127.0.0.1:0", "--ui", "none"]
    started = subprocess.Popen(command, cwd=shop, stdout=subprocess.PIPE, text=True)
    yield started
    if started.poll() is None:
        started.send_signal(signal.SIGTERM)
    started.communicate(timeout=60)


def line_with(up: "subprocess.Popen[str]", part: str) -> str:
    """The first line that has this."""
    assert up.stdout is not None
    return next(line for line in up.stdout if part in line)


def assets(url: str) -> set[str]:
    try:
        nodes = GraphQL(url).ask(_ASSETS)["assetNodes"]
    except (OSError, ValueError):
        return set()
    return {node["assetKey"]["path"][-1] for node in nodes}


def test_changed_code_is_loaded_and_broken_code_is_not(
    up: "subprocess.Popen[str]", shop: Path, eventually: Eventually
) -> None:
    url = line_with(up, "Dagster  http").split()[1]
    line_with(up, "Ctrl-C")
    eventually(lambda: "first" in assets(url))

    # It can be imported, but Dagster cannot load it.
    without = CODE.format(name="first").replace(".asset", ".asset(required_resource_keys={'no'})")
    (shop / "definitions.py").write_text(without)
    assert "definitions.py: cannot be loaded" in line_with(up, "reload ")
    assert "'no'" in line_with(up, "DagsterInvalidDefinitionError")
    (shop / "notes.txt").write_text("no code")
    assert "first" in assets(url)

    (shop / "definitions.py").write_text(CODE.format(name="second"))
    assert line_with(up, "reload ").rstrip() == "reload   definitions.py: loaded"
    eventually(lambda: "second" in assets(url), within_s=60)
    assert "first" not in assets(url)


def test_the_code_is_what_a_project_is_loaded_from(tmp_path: Path) -> None:
    code = ["definitions.py", "shop/topics.py", "shop/defs/orders.yaml", "dagster_home2/a.py"]
    other = [".venv/a.py", "env/lib/a.py", "build/a.py", "notes.txt", "home/a.py", ".x.d/a.py"]
    for name in [*code, *other, "env/pyvenv.cfg"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    sources = Sources(tmp_path, ignored=[tmp_path / "home", tmp_path, tmp_path / "dagster_home"])

    assert all(sources.includes(tmp_path / name) for name in [*code, "new/module.py"])
    assert not any(sources.includes(tmp_path / name) for name in other)
    assert not sources.includes(tmp_path.parent / "a.py")


def test_only_another_content_is_a_change(tmp_path: Path) -> None:
    old, new, gone = (tmp_path / f"{name}.py" for name in ("old", "new", "gone"))
    old.write_text("a = 1")
    gone.write_text("b = 1")
    sources = Sources(tmp_path, ignored=[])

    old.write_text("a = 1")
    assert sources.changed([old, gone]) == []
    old.write_text("a = 2")
    new.write_text("c = 1")
    gone.unlink()
    assert sources.changed([old, new, gone]) == [gone, new, old]
    sources.load()
    assert sources.changed([old, new, gone]) == []


class Slow(DevServer):
    """A DevServer whose code takes its time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "dagster_home", code=CodeLocation("definitions", folder))
        self.dagster_home.mkdir()


def test_a_check_of_code_ends_when_it_is_told_to(tmp_path: Path) -> None:
    (tmp_path / "definitions.py").write_text("import time\ntime.sleep(600)\n")
    over = threading.Event()
    threading.Timer(1.0, over.set).start()

    said = Slow(tmp_path).check_code(over=over)

    assert said
    assert over.is_set()


def test_code_that_takes_too_long_is_refused(tmp_path: Path) -> None:
    (tmp_path / "definitions.py").write_text("import time\ntime.sleep(600)\n")

    said = Slow(tmp_path).check_code(over=threading.Event(), timeout_s=0.5)

    assert said.startswith("It was not loaded within 0.5 s.")


def test_an_error_in_another_encoding_is_told(tmp_path: Path) -> None:
    (tmp_path / "definitions.py").write_bytes(
        b"import os\nos.write(2, b'caf\\xe9')\nraise ValueError\n"
    )

    assert "caf\ufffd" in Slow(tmp_path).check_code(over=threading.Event())


def test_reload_without_a_project_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    told = process(RMQ, "up", "--home", str(home), "--reload")

    assert told.returncode == 1
    assert "There is no project to reload" in told.stderr
