"""docs/promises.md names a test for every promise; each exists, and goes through every endpoint.

Through that for RocketMQ clients it goes where their protocol has words for it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.behaviour.conftest import ENDPOINTS, TABLE_ENDPOINTS
from tests.promises import DOCS, promises

ROOT = Path(__file__).resolve().parents[2]
COLLECTED = re.compile(r"tests/behaviour/(test_\w+\.py::test_\w+)(?:\[(.+)\])?")


@pytest.fixture(scope="module")
def endpoints() -> dict[str, set[str]]:
    """The endpoints that each test of this folder goes through, as pytest collects them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/behaviour"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found: dict[str, set[str]] = defaultdict(set)
    for test, parameters in COLLECTED.findall(told):
        found[test].update(name for name in ENDPOINTS if name in parameters.split("-"))
    return found


def test_every_promise_has_a_test_through_every_endpoint(endpoints: dict[str, set[str]]) -> None:
    told = promises(DOCS / "promises.md")
    assert len(told) > 100
    spoken = 0

    for promise, tests in told.items():
        assert tests, f"{promise}: no test"
        missing = [test for test in tests if test not in endpoints]
        assert not missing, f"{promise}: there is no {missing}"
        through = {name for test in tests for name in endpoints[test]}
        assert through >= set(TABLE_ENDPOINTS), f"{promise}: only through {through}"
        spoken += "grpc" in through

    assert spoken > len(told) / 2
