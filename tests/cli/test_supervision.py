"""A home's broker has one supervisor."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rmq_pipeline.cli.supervision import Supervision
from rmq_pipeline.cli.supervisor import Supervisor
from rmq_pipeline.cli.up import _run
from rmq_pipeline.errors import ConflictError, HomeLockedError
from rmq_pipeline.flight import process
from rmq_pipeline.flight.flags import Listening
from tests.free_address import free_doors

ROOT = Path(__file__).parents[2]
#: Has the home to itself, and leaves a child behind when it is killed.
HOLDING = """
import subprocess, sys
from pathlib import Path
from rmq_pipeline.cli.supervision import Supervision
supervision = Supervision.begin(Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=0, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
child.wait()
"""


@contextmanager
def holding(home: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that supervises the home and has started one of its own."""
    command = [sys.executable, "-c", HOLDING, str(home)]
    other = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    child = int(other.stdout.readline())
    try:
        yield other
    finally:
        # First: it would end by itself at the end of its input.
        os.kill(child, signal.SIGKILL)
        other.kill()
        other.communicate()


def test_a_second_up_is_refused_and_leaves_the_broker_of_the_first_alone(
    home: Path, tmp_path: Path
) -> None:
    # Dagster could not start here, which ends the broker that was started for it.
    (folder := tmp_path / "dagster").touch()
    told: list[str] = []
    with Supervisor(home, free_doors(), tell=told.append) as first:
        before = first.endpoint

        with pytest.raises(
            HomeLockedError, match=f"Process {os.getpid()} already supervises the broker"
        ) as no:
            _run(home, Listening(), settings=None, folder=folder, port=0)

        assert "stop it first with Ctrl-C" in str(no.value)
        assert process.serving(home) == before
    assert not told


def test_a_supervisor_that_was_refused_stops_nothing(home: Path) -> None:
    with Supervisor(home, free_doors()) as first:
        second = Supervisor(home)
        with pytest.raises(HomeLockedError):
            second.start()

        second.stop()

        assert process.serving(home) == first.endpoint


def test_nobody_is_asked_for_a_broker_while_another_process_supervises_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "start", lambda *_, **__: pytest.fail("it was looked for"))

    with holding(home) as other, pytest.raises(HomeLockedError, match=f"Process {other.pid} "):
        Supervisor(home).start()


def test_a_supervisor_that_was_killed_leaves_the_home_free_though_its_child_lives(
    home: Path,
) -> None:
    with holding(home) as other:
        other.kill()
        other.wait()

        Supervision.begin(home).end()


def test_a_supervisor_that_does_not_start_leaves_the_home_free(home: Path) -> None:
    other = process.start(home, upkeep="self")

    with pytest.raises(ConflictError):
        Supervisor(home).start()

    Supervision.begin(home).end()
    assert process.serving(home) == other
    process.stop(home)


def test_a_supervisor_that_has_stopped_leaves_the_home_free(home: Path) -> None:
    with Supervisor(home, free_doors()):
        pass

    Supervision.begin(home).end()
    assert process.serving(home) is None
