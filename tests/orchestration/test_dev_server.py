"""Dagster's processes: up from Python, kept alive, and gone afterwards."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rmq_pipeline.errors import HomeLockedError, RequestError
from rmq_pipeline.orchestration.dev_server import SESSION, DagsterStartError, DevServer
from rmq_pipeline.orchestration.project import CodeLocation
from rmq_pipeline.orchestration.topic_reports import CREATES
from tests.conftest import Eventually
from tests.free_address import free_port
from tests.waiting import until

pytestmark = [pytest.mark.dagster, pytest.mark.slow]

CODE = """
import threading

import dagster as dg


@dg.asset
def endless() -> None:
    threading.Event().wait()


@dg.sensor(
    target=endless, default_status=dg.DefaultSensorStatus.RUNNING, tags={"rmq/creates": "topics"}
)
def once(context):
    return dg.RunRequest(run_key="once")


@dg.op(config_schema={"who": str})
def hello(context):
    if context.op_config["who"] == "nobody":
        raise ValueError("nobody is there")


@dg.job
def greet():
    hello()


defs = dg.Definitions(
    assets=[endless], jobs=[greet], sensors=[once], executor=dg.in_process_executor
)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with code to load."""
    return begun(tmp_path / "project")


def begun(folder: Path) -> Path:
    folder.mkdir()
    (folder / "sample_defs.py").write_text(CODE)
    return folder


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    """For tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("running")
    with server(folder / "dagster_home", begun(folder / "project")) as dagster:
        yield dagster
    until(lambda: not living(folder / "dagster_home"))


@pytest.fixture
def dagster_home(tmp_path: Path) -> Iterator[Path]:
    home = tmp_path / "dagster_home"
    yield home
    until(lambda: not living(home))


def server(dagster_home: Path, project: Path) -> DevServer:
    code = CodeLocation("sample_defs", project)
    return DevServer(dagster_home, port=free_port(), code=code)


def living(dagster_home: Path) -> list[int]:
    """Processes of a session, zombies aside."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(SESSION) == str(dagster_home):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def test_sensors_tick_and_stop_ends_everything(
    dagster_home: Path, project: Path, eventually: Eventually
) -> None:
    dagster = server(dagster_home, project)

    with dagster:
        assert dagster.wait_for_topics(threading.Event().wait, timeout_s=60) == []
        assert dagster.graphql.runs(), "requested by the first tick"
        assert dagster.graphql.sensors_without_tick(CREATES, since_s=time.time() + 60) == ["once"]
        eventually(lambda: dagster.graphql.runs(statuses=("STARTED",)), within_s=60)
        with pytest.raises(HomeLockedError):
            server(dagster_home, project).start()

    eventually(lambda: not living(dagster_home))
    assert (dagster_home / "dagster.yaml").exists()


def test_a_process_that_dies_is_started_again(running: DevServer, eventually: Eventually) -> None:
    before, restarts = running.pids(), running.restarts
    os.kill(before["webserver"], signal.SIGKILL)

    def answers() -> bool:
        try:
            return running.graphql.readiness(since_s=0).ready
        except (OSError, ValueError):
            return False

    eventually(lambda: running.pids()["webserver"] != before["webserver"])
    eventually(answers, within_s=60)
    assert running.restarts == restarts + 1


def test_a_job_is_launched_with_its_config(running: DevServer, eventually: Eventually) -> None:
    def config(**values: str) -> dict[str, object]:
        return {"ops": {"hello": {"config": values}}}

    graphql = running.graphql
    good = graphql.launch("greet", location="sample_defs", config=config(who="you"))
    bad = graphql.launch("greet", location="sample_defs", config=config(who="nobody"))

    with pytest.raises(ValueError, match="who"):
        graphql.launch("greet", location="sample_defs", config=config(name="you"))
    with pytest.raises(ValueError, match="is not launched"):
        graphql.launch("leave", location="sample_defs", config={})
    eventually(lambda: graphql.status(good) == "SUCCESS", within_s=60)
    eventually(lambda: graphql.status(bad) == "FAILURE", within_s=60)
    assert graphql.status("00000000-0000-0000-0000-000000000000") == ""


def test_processes_end_with_their_supervisor(
    dagster_home: Path, project: Path, eventually: Eventually
) -> None:
    script = f"""
        from pathlib import Path
        from rmq_pipeline.orchestration.dev_server import DevServer
        from rmq_pipeline.orchestration.project import CodeLocation

        home, project = Path({str(dagster_home)!r}), Path({str(project)!r})
        code = CodeLocation("sample_defs", project)
        dagster = DevServer(home, port={free_port()}, code=code)
        dagster.start()
        print("ready", flush=True)
        input()
    """
    supervisor = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "ready\n"
        assert len(living(dagster_home)) >= 3

        supervisor.kill()

    eventually(lambda: not living(dagster_home), within_s=30)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "\nraise ValueError('broken on\\npurpose')",
            "ValueError: broken on purpose (sample_defs.py, line 2).",
        ),
        ("x = 1", "DagsterInvariantViolationError: No Definitions, "),
    ],
    ids=["raises", "empty"],
)
def test_code_that_cannot_be_loaded_is_told(
    dagster_home: Path, project: Path, text: str, says: str
) -> None:
    (project / "sample_defs.py").write_text(text)

    with pytest.raises(DagsterStartError) as told:
        server(dagster_home, project).start()

    loading = f"Dagster cannot load sample_defs in {project}: "
    assert told.value.message.startswith(loading + says)
    assert "Traceback" in (dagster_home / "logs" / "code_server.log").read_text()


def test_a_port_that_is_taken_is_refused_with_the_process(
    dagster_home: Path, project: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code = CodeLocation.find("sample_defs", project)

        with pytest.raises(RequestError, match=f":{port}: .* by process {os.getpid()} "):
            DevServer(dagster_home, port=port, code=code).start()


def test_a_storage_that_cannot_be_opened_is_told(dagster_home: Path, project: Path) -> None:
    dagster_home.mkdir(exist_ok=True)
    url = f"postgresql+psycopg2://nobody@127.0.0.1:{free_port()}/dagster"
    storage = {"storage": {"postgres": {"postgres_url": url}}}
    (dagster_home / "dagster.yaml").write_text(json.dumps(storage))

    with pytest.raises(DagsterStartError, match=r"cannot open its storage.*Correct dagster\.yaml"):
        server(dagster_home, project).start()
    assert not living(dagster_home)
