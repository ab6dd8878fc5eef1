"""Killed at any step, the broker knows every transaction it has answered, and ends each once."""

import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rmq_pipeline.broker import Broker
from rmq_pipeline.clock import ManualClock
from tests.chaos.trader import ends
from tests.chaos.victim import SETTINGS

pytestmark = pytest.mark.chaos

ROOT = Path(__file__).resolve().parents[2]
KILLS = [
    ("staged", 9),
    ("half_written", 12),
    ("half_written", 37),
    ("written", 5),
    ("written", 24),
    ("written", 61),
    ("before_dispatch", 7),
    ("dispatched", 8),
]


@dataclass
class Facts:
    """What the killed broker had answered, and what it was asked at the end."""

    #: transaction_id -> message_id.
    begun: dict[str, str] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    #: The last end asked for, answered or not.
    trying: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Facts":
        facts = cls()
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):  # the kill came while it was written down
                break
            what, value = json.loads(line)
            if what in ("begun", "trying"):
                getattr(facts, what).update(value)
            else:
                facts.ended.update(dict.fromkeys(value, what))
        return facts


@pytest.mark.parametrize(("step", "times"), KILLS)
def test_every_transaction_ends_once_whenever_the_broker_is_killed(
    tmp_path: Path, step: str, times: int
) -> None:
    home, log = tmp_path / "home", tmp_path / "facts"
    command = [sys.executable, "-m", "tests.chaos.trader", str(home), str(log), step, str(times)]
    died = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    facts = Facts.read(log)

    clock = ManualClock(ManualClock().now_ms() + 3_600_000)
    with Broker.open(home, clock=clock, upkeep="none", settings=SETTINGS) as broker:
        for resolution in ("commit", "rollback"):
            wanted = facts.ended | facts.trying
            again = [each for each, how in wanted.items() if how == resolution]
            answer = broker.end_transactions(ends(again, resolution))
            for each, first in zip(again, answer["first_time"].to_pylist(), strict=True):
                assert not (first and each in facts.ended), "an answered end was forgotten"
        broker.check_transactions()
        left = broker.fetch_checks(limit=1_000)["transaction_id"].to_pylist()
        broker.end_transactions(ends(left, "rollback"))

        delivered = Counter(
            row
            for queue_id in range(2)
            for row in broker.read("trades", queue_id, offset=0, limit=10_000)[
                "message_id"
            ].to_pylist()
        )
        committed = {
            facts.begun[each]
            for each, how in (facts.ended | facts.trying).items()
            if how == "commit"
        }
        # What was never answered to have begun was never asked to end: it is rolled back now.
        assert delivered == Counter(committed)
        assert broker.sql("FROM half").num_rows == 0
