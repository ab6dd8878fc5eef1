"""``rmq up`` with handlers that always fail: few runs, red checks, one word on the terminal.

RMQ_FAILING_S says for how long; with 3600, and pytest -m long -s, it is an hour.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.graphql import GraphQL
from tests.free_address import free_endpoints, free_port
from tests.waiting import until

pytestmark = [pytest.mark.dagster, pytest.mark.slow]

ROOT: Final = Path(__file__).parents[2]
RMQ: Final = str(Path(sys.executable).with_name("rmq"))
GROUPS: Final = ("raising", "crashing", "unwritable")
CHECKS: Final = ("dead_letters", "no_loss", "oldest_unread")
#: Failed runs of one consumer in an hour, at most.
MOST_FAILED: Final = 12
#: A check is red, or green again, within this time,
TOLD_S: Final = 60.0
#: and where other tests run side by side.
TOLD_BESIDE_OTHERS_S: Final = 240.0
_EVALUATIONS: Final = """query ($key: AssetKeyInput!, $name: String!) {
  assetCheckExecutions(assetKey: $key, checkName: $name, limit: 1) { evaluation { success } }
}"""


class Up:
    """``rmq up`` of a pipeline in a folder, as a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.port = free_port()
        self.said: list[str] = []
        endpoints = free_endpoints()
        self._command = [RMQ, "up", "--home", str(self.home), "--port", str(self.port)]
        self._command += ["--dagster-home", str(folder / "dagster_home")]
        self._command += ["--flight", str(endpoints.flight), "--grpc", str(endpoints.grpc)]
        self._command += ["-m", "failing_pipeline", "-d", str(folder)]

    def start(self) -> None:
        before = len(self.said)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RMQ_BUSY_S": "0"}
        self.process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()
        until(lambda: "Ctrl-C stops all." in self.said[before:], within_s=120, what="Dagster is up")

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as stdout:
            for line in stdout:
                self.said.append(line.rstrip("\n"))

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=120)
        self._reader.join()

    @property
    def graphql(self) -> GraphQL:
        return GraphQL(f"http://127.0.0.1:{self.port}", timeout_s=30)

    def checks(self) -> dict[tuple[str, str], bool | None]:
        """Whether each check passes; None: it was never evaluated."""
        return {(group, name): self._passes(group, name) for group in GROUPS for name in CHECKS}

    def _passes(self, group: str, name: str) -> bool | None:
        asked = {"key": {"path": [group]}, "name": name}
        for execution in self.graphql.ask(_EVALUATIONS, asked)["assetCheckExecutions"]:
            evaluation = execution["evaluation"]
            return None if evaluation is None else bool(evaluation["success"])
        return None

    def failed(self) -> Counter[str]:
        """Failed runs by job."""
        return Counter(run["jobName"] for run in self.graphql.runs(statuses=("FAILURE",)))


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    shutil.copy(Path(__file__).with_name("failing_pipeline.py"), tmp_path)
    up = Up(tmp_path)
    up.start()
    yield up
    up.stop()


def seconds(condition: Callable[[], Any], *, within_s: float, what: Callable[[], str]) -> float:
    """How long it took until a condition held; Dagster is asked once a second."""
    began = time.monotonic()
    pause = threading.Event()
    while not condition():
        if time.monotonic() - began > within_s:
            raise AssertionError(f"not within {within_s:g} s: {what()}")
        pause.wait(1.0)
    return time.monotonic() - began


@pytest.mark.timeout(1_200)
def test_handlers_that_always_fail_for_a_while(up: Up) -> None:
    fails(up, for_s=0.0, told_s=TOLD_BESIDE_OTHERS_S)


@pytest.mark.long
@pytest.mark.timeout(7_200)
def test_handlers_that_always_fail_for_an_hour(up: Up) -> None:
    fails(up, for_s=float(os.environ.get("RMQ_FAILING_S", "600")), told_s=TOLD_S)


def fails(up: Up, *, for_s: float, told_s: float) -> None:
    with Client(home=up.home) as client:
        until(lambda: has_groups(client), within_s=60, what="the consumers' groups")
        for topic in ("alarms", "crashes", "rows"):
            client.send(topic, pa.table({"body": [b"x"] * 5}))
        sent = time.monotonic()

        red_s = seconds(
            lambda: set(up.checks().values()) == {False},
            within_s=told_s,
            what=lambda: f"{up.checks()} {up.failed()}",
        )
        print(f"all checks red after {red_s:.0f} s")
        told = seconds(
            lambda: any(line.startswith("crashing failed") for line in up.said),
            within_s=told_s,
            what=lambda: "\n".join(up.said),
        )
        print(f"told on the terminal {red_s + told:.0f} s after the messages")
        watched(up, until_s=sent + for_s)
        failed = up.failed()
        print(f"failed runs after {time.monotonic() - sent:.0f} s: {dict(failed)}")
        assert failed["crashing_window"] > 0
        assert failed["unwritable_window"] > 0
        assert all(count <= MOST_FAILED for count in failed.values()), failed

        (up.folder / "mended").touch()
        mended = time.monotonic()
        up.stop()
        up.start()
        print(f"rmq up was started again within {time.monotonic() - mended:.0f} s")
        green_s = seconds(
            lambda: set(up.checks().values()) == {True},
            within_s=told_s,
            what=lambda: f"{up.checks()} {up.failed()}",
        )
        print(f"all checks green {green_s:.0f} s after the mended code was loaded")
    print("\n".join(up.said))


def has_groups(client: Client) -> bool:
    names = set(client.list_groups()["name"].to_pylist())
    return names >= set(GROUPS)


def watched(up: Up, *, until_s: float) -> None:
    """Look once a minute until then: no check may turn green while the handlers fail."""
    pause = threading.Event()
    while (left_s := until_s - time.monotonic()) > 0:
        pause.wait(min(60.0, left_s))
        checks, failed = up.checks(), up.failed()
        print(f"{until_s - time.monotonic():6.0f} s left: {dict(failed)}", flush=True)
        assert set(checks.values()) == {False}, checks
