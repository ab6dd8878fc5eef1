"""The plugin in a fresh pytest process, found by its entry point as in an installed package."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = '''
import pyarrow as pa

from rmq_pipeline import Outcome, spark_consumer
from rmq_pipeline.orchestration.declarations import topic

ORDERS = topic("orders", queues=1)
ROW = pa.schema([("body", pa.binary()), ("born_at_ms", pa.int64())])


@spark_consumer(topic=ORDERS, group="billing", sink="bills", sink_schema=ROW)
def billing(messages, state):
    """Write a row for each message."""
    return Outcome(rows=messages.select(ROW.names))
'''
TESTS = """
from pipeline import ORDERS, billing


def test_an_order_becomes_a_row(rmq):
    rmq.publish(ORDERS, ["paid"])

    assert rmq.drain(billing).rows["body"].to_pylist() == [b"paid"]


def test_tests_share_nothing(rmq):
    assert rmq.drain(billing).delivered == 0
"""
WITHOUT = """
import sys


def test_the_plugin_loads_little():
    assert "rmq_pipeline.pytest_plugin" in sys.modules
    heavy = {"dagster", "pyspark", "duckdb", "pyarrow", "rmq_pipeline.testing"}
    assert not heavy & set(sys.modules)


def test_the_library_is_loaded_as_it_is():
    from rmq_pipeline import clock

    assert type(clock.__loader__).__name__ == "SourceFileLoader"
"""


@pytest.fixture
def installed(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with what an installer writes of the package's entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    points = project["entry-points"]["pytest11"]
    written = pytester.path / "site" / "kit-1.dist-info"
    written.mkdir(parents=True)
    (written / "METADATA").write_text("Metadata-Version: 2.1\nName: kit\nVersion: 1\n")
    lines = ["[pytest11]", *(f"{name} = {target}" for name, target in points.items())]
    (written / "entry_points.txt").write_text("\n".join(lines))
    modules = (path.relative_to(ROOT) for path in (ROOT / "rmq_pipeline").rglob("*.py"))
    (written / "RECORD").write_text("\n".join(f"{path.as_posix()},," for path in modules))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{written.parent}")
    return pytester


def test_an_installed_user_has_the_fixture(installed: pytest.Pytester) -> None:
    installed.makepyfile(pipeline=PIPELINE, test_pipeline=TESTS)

    result = installed.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider", timeout=120)

    assert result.parseoutcomes() == {"passed": 2}


def test_a_session_without_it_pays_nothing(installed: pytest.Pytester) -> None:
    installed.makepyfile(test_without=WITHOUT)

    result = installed.runpytest_subprocess("-p", "no:cacheprovider", timeout=120)

    assert result.parseoutcomes() == {"passed": 2}


def test_the_fixtures_are_documented(installed: pytest.Pytester) -> None:
    result = installed.runpytest_subprocess("--fixtures", timeout=120)

    result.stdout.fnmatch_lines(["rmq -- *", "*Open a broker of this test alone*"])
    assert sys.modules["rmq_pipeline.pytest_plugin"].__doc__
