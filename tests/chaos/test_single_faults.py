"""One fault of the disk at a time: the broker serves again by itself, and nothing answered is lost.

RMQ_CHAOS_FAULTS sets how many faults the long test goes through (200).
"""

import errno
import os
from pathlib import Path

import pytest

from tests.chaos.failing_calls import Call, Fault
from tests.chaos.single_faults import faults, go_through

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(7200)]

FAULTS = int(os.environ.get("RMQ_CHAOS_FAULTS", "200"))
#: Of each kind of file one, with what the broker did not live through before.
SHARE = (
    Fault("*/log/*.log", Call.SYNC, errno.EIO),
    Fault("*/log/*.new", Call.OPEN, errno.EMFILE, 1.0),
    Fault("*/state.duckdb", Call.WRITE, errno.EIO),
    Fault("*/state.duckdb.wal", Call.SYNC, errno.EIO),
    Fault("*/snapshots/*", Call.WRITE, errno.EIO),
)


def test_a_broker_serves_again_after_a_fault(tmp_path: Path) -> None:
    outcomes = list(go_through(SHARE, tmp_path))

    assert all(outcome.hits for outcome in outcomes)
    assert [str(outcome) for outcome in outcomes if not outcome.is_good] == []


@pytest.mark.long
def test_a_broker_serves_again_after_every_fault(tmp_path: Path, seed: int) -> None:
    outcomes = []
    for outcome in go_through(faults(FAULTS, seed=seed), tmp_path):
        outcomes.append(outcome)
        print(outcome, flush=True)

    bad = [str(outcome) for outcome in outcomes if not outcome.is_good]
    assert not bad, f"seed {seed}: {bad}"
