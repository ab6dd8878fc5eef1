"""Children that die are started again until they run, and their runs are over."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from rmq_pipeline.orchestration.dev_server import DevServer
from tests.conftest import Eventually

pytestmark = pytest.mark.dagster

STATUS = dg.DagsterRunStatus


class Bare(DevServer):
    """A DevServer whose children live, and nothing more."""

    def _commands(self) -> dict[str, list[str]]:
        idle = ["http.server", "--bind", "127.0.0.1", "0"]
        return dict.fromkeys(("code_server", "daemon", "webserver"), idle)

    def _serves_code(self) -> bool:
        return True

    def _is_ready(self, since_s: float) -> bool:
        return since_s > 0


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Bare]:
    with Bare(tmp_path / "dagster_home", port=1) as server:
        yield server


@dg.job
def nothing() -> None:
    """Never run: its runs only have a status."""


def begun(home: Path, *statuses: dg.DagsterRunStatus) -> dict[dg.DagsterRunStatus, str]:
    """Runs as Dagster left them; their ids."""
    with dg.DagsterInstance.from_config(str(home)) as instance:
        return {
            status: instance.create_run_for_job(nothing, status=status).run_id
            for status in statuses
        }


def now(home: Path, run_id: str) -> dg.DagsterRunStatus:
    with dg.DagsterInstance.from_config(str(home)) as instance:
        run = instance.get_run_by_id(run_id)
        assert run is not None
        return run.status


def end(server: DevServer, name: str) -> int:
    pid = server.pids()[name]
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_child_that_cannot_be_started_again_is_tried_again(
    bare: Bare, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    logs, away = bare.dagster_home / "logs", bare.dagster_home / "away"

    # No process can open its log: each gets an OSError.
    logs.rename(away)
    webserver = end(bare, "webserver")
    eventually(lambda: "a child is not restarted" in caplog.text, within_s=60)
    away.rename(logs)

    eventually(lambda: bare.restarts > 0, within_s=60)  # counted once the process is there
    assert bare.pids()["webserver"] != webserver
    assert bare.restarts == 1


def test_one_child_that_cannot_be_started_again_keeps_no_other_from_it(
    bare: Bare, eventually: Eventually
) -> None:
    log = bare.log_path("code_server")
    log.unlink()
    log.mkdir()

    # The code server comes first in each turn.
    code_server, webserver = end(bare, "code_server"), end(bare, "webserver")

    eventually(lambda: bare.pids()["webserver"] != webserver, within_s=60)
    assert bare.pids()["code_server"] == code_server
    log.rmdir()
    eventually(lambda: bare.pids()["code_server"] != code_server, within_s=60)


def test_runs_of_a_code_server_that_died_are_over(bare: Bare, eventually: Eventually) -> None:
    home = bare.dagster_home
    lost = begun(home, STATUS.STARTING, STATUS.STARTED, STATUS.CANCELING)
    kept = begun(home, STATUS.NOT_STARTED, STATUS.SUCCESS)

    code_server = end(bare, "code_server")
    eventually(lambda: bare.pids()["code_server"] != code_server, within_s=60)

    assert [now(home, run_id) for run_id in lost.values()] == [STATUS.FAILURE] * 3
    assert [now(home, run_id) for run_id in kept.values()] == list(kept)


def test_runs_go_on_when_another_child_dies(bare: Bare, eventually: Eventually) -> None:
    runs = begun(bare.dagster_home, STATUS.STARTED)

    daemon = end(bare, "daemon")
    eventually(lambda: bare.pids()["daemon"] != daemon, within_s=60)

    assert now(bare.dagster_home, runs[STATUS.STARTED]) == STATUS.STARTED


def test_a_code_server_is_started_again_though_its_runs_cannot_be_looked_at(
    bare: Bare, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    (bare.dagster_home / "dagster.yaml").write_text("storage: {nowhere: {}}")

    code_server = end(bare, "code_server")

    eventually(lambda: bare.pids()["code_server"] != code_server, within_s=60)
    assert "cannot be marked as failed" in caplog.text


def test_one_run_that_cannot_be_reported_keeps_no_other_from_it(
    bare: Bare, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    home = bare.dagster_home
    good, bad = (begun(home, STATUS.STARTED)[STATUS.STARTED] for _ in range(2))
    # The newest is reported first; its events cannot be written.
    events = home / "history" / "runs" / f"{bad}.db"
    events.unlink(missing_ok=True)
    events.mkdir(parents=True)

    code_server = end(bare, "code_server")
    eventually(lambda: bare.pids()["code_server"] != code_server, within_s=60)

    assert now(home, good) == STATUS.FAILURE
    assert now(home, bad) == STATUS.STARTED
    assert bad in str([vars(record) for record in caplog.records])
