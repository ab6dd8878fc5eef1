"""The examples of docs/testing.md pass, in the files and with the result that the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rmq_pipeline.testing import DrainResult, TestBroker

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text("utf-8")
_FILE = re.compile(r"```python title=\"(\w+)\.py\"\n(.*?)```", re.DOTALL)


def test_the_examples_pass(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    files = dict(_FILE.findall(PAGE))
    pytester.makepyfile(**files)
    pytester.makeconftest("from rmq_pipeline.pytest_plugin import rmq, rmq_fork, rmq_settings")

    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", timeout=120)

    assert set(files) == {
        *("orders", "test_orders", "test_payments"),
        *("test_levels", "test_incident"),
    }
    assert result.parseoutcomes() == {"passed": 6}


def test_every_call_is_on_the_page() -> None:
    calls = {name for name in vars(TestBroker) if not name.startswith("_")} - {"open", "fork"}

    assert {name for name in calls if f"`rmq.{name}(" not in PAGE} == set()


def test_every_count_of_a_drain_is_on_the_page() -> None:
    assert {name for name in DrainResult.__slots__ if f"`{name}`" not in PAGE} == set()
