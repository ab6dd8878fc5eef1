"""The demo with the processes of its Spark windows killed: the same facts, row for row."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.spark,
    pytest.mark.dagster,
    pytest.mark.timeout(900),
]

RMQ = str(Path(sys.executable).with_name("rmq"))
#: Which processes are killed, in this order; each as soon as there is one, a moment later.
VICTIMS = ("driver", "run worker", "driver", "run worker")
MOMENT_S = (0.5, 6.0)


def spark_driver(demo: int) -> psutil.Process | None:
    """The JVM of a window's Spark session, if there is one below the demo."""
    for process in psutil.Process(demo).children(recursive=True):
        try:
            if process.name() == "java":
                return process
        except psutil.Error:
            continue
    return None


def kill_one(demo: int, victim: str, *, over: threading.Event) -> bool:
    """Wait for a Spark session, then a random moment, and kill -9; False when the demo ended."""
    while not over.wait(0.2):
        jvm = spark_driver(demo)
        if jvm is None:
            continue
        target = jvm if victim == "driver" else jvm.parent()
        if target is None or over.wait(random.uniform(*MOMENT_S)):
            continue
        try:
            target.kill()
            jvm.wait(30)
        except psutil.NoSuchProcess:
            continue
        return True
    return False


def test_a_day_has_the_same_facts_when_spark_drivers_and_run_workers_are_killed(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [RMQ, "demo", "--days", "1", "--json", "--timeout", "700"]
    demo = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    over = threading.Event()
    kills: list[str] = []

    def kill_all() -> None:
        kills.extend(victim for victim in VICTIMS if kill_one(demo.pid, victim, over=over))

    killer = threading.Thread(target=kill_all)
    killer.start()
    try:
        out, told = demo.communicate(timeout=800)
    finally:
        over.set()
        killer.join()
        if demo.poll() is None:
            demo.send_signal(signal.SIGINT)
            demo.wait(60)

    facts = json.loads(out)
    assert facts["wrong"] == [], told
    assert demo.returncode == 0, told
    assert (facts["published"], facts["processed"], facts["dead_lettered"]) == (842, 838, 4)
    assert (facts["order_violations"], facts["upkeep_fallbacks"]) == (0, 0)
    assert (facts["crew_changes"], facts["halves_open"]) == (646, 0)
    assert (facts["parked"], facts["waiting_behind"]) == (["N730MQ"], 3)
    assert (facts["redriven_acked"], facts["redriven_twice"]) == (4, 0)
    assert facts["rotations_changed"] == 0
    assert len(kills) >= 2
