"""The code server's runs: forks of a process that has the code, ended like any other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rmq_pipeline.orchestration.code_server import PRELOADED
from rmq_pipeline.orchestration.dev_server import DevServer
from rmq_pipeline.orchestration.project import CodeLocation
from tests.conftest import Eventually
from tests.free_address import free_port

pytestmark = [pytest.mark.dagster, pytest.mark.slow]

CODE = """
import json
import os
import sys
import threading
from pathlib import Path

import dagster as dg

IMPORTED_IN = os.getpid()
FOLDER = Path(__file__).parent


@dg.asset
def endless(context: dg.AssetExecutionContext) -> None:
    facts = {"pid": os.getpid(), "imported_in": IMPORTED_IN, "modules": list(sys.modules)}
    (FOLDER / "new").write_text(json.dumps({**facts, "run_id": context.run_id}))
    (FOLDER / "new").rename(FOLDER / f"{context.run.tags['wanted']}.json")
    threading.Event().wait()


@dg.sensor(
    target=endless, default_status=dg.DefaultSensorStatus.RUNNING, minimum_interval_seconds=1
)
def on_request(context):
    for request in FOLDER.glob("*.wanted"):
        yield dg.RunRequest(run_key=request.stem, tags={"wanted": request.stem})


defs = dg.Definitions(assets=[endless], sensors=[on_request], executor=dg.in_process_executor)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with code to load."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "sample_defs.py").write_text(CODE)
    return folder


@pytest.fixture(scope="module")
def dagster(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Iterator[DevServer]:
    home = tmp_path_factory.mktemp("dagster") / "home"
    port = free_port()
    with DevServer(home, port=port, code=CodeLocation("sample_defs", project)) as dagster:
        yield dagster


@pytest.fixture
def run(
    dagster: DevServer, project: Path, eventually: Eventually, request: pytest.FixtureRequest
) -> dict[str, Any]:
    """What a run of the test's own says of itself; it goes on until it is ended."""
    assert dagster.url
    name = request.node.name
    (project / f"{name}.wanted").touch()
    eventually((project / f"{name}.json").exists, within_s=60)
    facts: dict[str, Any] = json.loads((project / f"{name}.json").read_text())
    return facts


def fork_servers(code_server: int) -> list[int]:
    """Fork servers that a code server has started."""
    children = psutil.Process(code_server).children()
    return [each.pid for each in children if "multiprocessing.forkserver" in command_of(each)]


def command_of(process: psutil.Process) -> str:
    """Its command line; nothing for one that has just ended, or was not yet given any."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def test_a_run_is_a_fork_of_a_process_that_has_the_code(
    dagster: DevServer, run: dict[str, Any]
) -> None:
    template = psutil.Process(run["pid"]).ppid()

    assert fork_servers(dagster.pids()["code_server"]) == [template]
    assert run["imported_in"] == template


def test_all_that_is_to_be_imported_beforehand_is(run: dict[str, Any]) -> None:
    assert set(PRELOADED) <= set(run["modules"])


def test_a_run_that_is_ended_is_canceled_and_gone(
    dagster: DevServer, run: dict[str, Any], eventually: Eventually
) -> None:
    dagster.graphql.terminate([run["run_id"]])

    def is_canceled() -> bool:
        return run["run_id"] in {
            each["runId"] for each in dagster.graphql.runs(statuses=("CANCELED",))
        }

    eventually(is_canceled, within_s=30)
    eventually(lambda: not psutil.pid_exists(run["pid"]), within_s=30)


def test_runs_and_fork_server_end_with_the_code_server(
    dagster: DevServer, run: dict[str, Any], eventually: Eventually
) -> None:
    old = dagster.pids()["code_server"]
    (template,) = fork_servers(old)

    psutil.Process(old).kill()

    eventually(lambda: not psutil.pid_exists(run["pid"]), within_s=30)
    eventually(lambda: not psutil.pid_exists(template), within_s=30)
    eventually(lambda: dagster.pids()["code_server"] != old, within_s=30)
    eventually(lambda: fork_servers(dagster.pids()["code_server"]), within_s=60)
