"""A broker killed between exhausting and dead-lettering a message dead-letters it at start."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from tests.chaos.victim import SETTINGS

pytestmark = pytest.mark.chaos

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("step", ["staged", "half_written"])
def test_exhausted_messages_block_no_message_after_a_start(tmp_path: Path, step: str) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-m", "tests.chaos.dead_lettering", str(home), step]
    died = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr

    with Broker.open(home, clock=ManualClock(), upkeep="none", settings=SETTINGS) as broker:
        got = broker.receive("readers", "orders", limit=3)
        [buried] = broker.sql("FROM dead_letters").to_pylist()

    assert got["body"].to_pylist() == [b"1", b"2"]
    assert buried["reason"] == "odd"
