"""docs/consumer_promises.md names a test for every promise, and each exists."""

import re
from pathlib import Path

from tests.promises import DOCS, promises

HERE = Path(__file__).parent


def test_every_promise_has_a_test() -> None:
    told = promises(DOCS / "consumer_promises.md")
    there = {
        f"{file.name}::{name}"
        for file in HERE.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert len(told) > 40

    for promise, tests in told.items():
        assert tests, f"{promise}: no test"
        assert set(tests) <= there, f"{promise}: there is no {set(tests) - there}"
