"""The demo, from end to end."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.errors import OperatorError
from rmq_pipeline.examples.flights.demo import run

RMQ = str(Path(sys.executable).with_name("rmq"))


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.dagster
@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_a_day_has_the_same_facts_when_the_broker_is_killed(tmp_path: Path) -> None:
    command = [RMQ, "demo", "--days", "1", "--json", "--timeout", "900"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    demo = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert demo.stdout is not None
    assert demo.stderr is not None
    kills = 0
    told: list[str] = []
    for line in demo.stderr:
        told.append(line)
        if (home := re.search(r"home (/\S+)$", told[0])) and line.startswith("published"):
            endpoint = Endpoint.read(Path(home[1]))
            if kills < 3 and endpoint is not None:
                os.kill(endpoint.pid, signal.SIGKILL)
                kills += 1

    out, _ = demo.communicate(timeout=60)
    facts = json.loads(out)

    assert demo.returncode == 0, "".join(told)
    assert facts["wrong"] == []
    assert (facts["published"], facts["dead_lettered"], facts["order_violations"]) == (842, 4, 0)
    assert facts["upkeep_fallbacks"] == 0
    assert (facts["crew_changes"], facts["crews_cancelled"], facts["halves_open"]) == (646, 3, 0)
    assert facts["halves_checked"] == facts["halves_left_open"] > 0
    assert (facts["parked"], facts["waiting_behind"]) == (["N730MQ"], 3)
    assert (facts["redriven"], facts["redriven_acked"], facts["redriven_twice"]) == (4, 4, 0)
    assert facts["rotations_changed"] == 0
    assert {"check_transactions", "unpark", "redrive"} <= set(facts["runs"])
    assert facts["broker_restarts"] == kills > 0
    assert list(tmp_path.iterdir()) == []


def test_days_that_there_are_not_are_refused() -> None:
    told = subprocess.run(
        [RMQ, "demo", "--days", "366"], check=False, capture_output=True, text=True
    )

    assert told.returncode == 1
    assert "There are 1 to 365 days" in told.stderr


def test_without_a_jdk_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")

    with pytest.raises(OperatorError, match="JAVA_HOME is /nowhere, which has no bin/java"):
        run(days=1)
