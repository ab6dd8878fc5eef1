"""A run of tests with workers: how they share, and that nothing of them stays."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil

from tests.conftest import APART, share
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[1]

LEAVES = """
import os
import tempfile
from pathlib import Path

import pytest


@pytest.mark.parametrize("is_killed", [False, True])
def test_leaves_a_process_and_a_file(is_killed):
    Path(tempfile.mkdtemp(), "file").touch()
    left = os.posix_spawnp("sleep", ["sleep", "600"], os.environ)
    Path(__file__).with_name(f"{is_killed}.pid").write_text(str(left))
    if is_killed:
        os._exit(1)
"""


def test_a_spark_session_is_of_one_worker() -> None:
    assert share("tests/spark/test_a.py::test_x[1]") == share("tests/spark/test_b.py::test_y")
    assert share("tests/store/test_a.py::test_x") == share("tests/store/test_a.py::test_y[a::b]")
    assert share("tests/store/test_a.py::test_x") != share("tests/store/test_b.py::test_x")


def test_tests_of_spark_without_its_session_are_of_any_worker() -> None:
    """Each file apart is there, and none of its tests takes the session of the worker."""
    for file in APART:
        assert "spark: SparkSession" not in (text := (ROOT / file).read_text())
        assert "served: Served" not in text
        assert share(f"{file}::test_x") == file


def test_make_names_the_files_of_tests_that_run_alone() -> None:
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(
            r"^(?:@|pytestmark = .*| {4})pytest\.mark\.alone\b", file.read_text(), re.MULTILINE
        )
    }

    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")

    (named,) = re.findall(r"^ALONE := (.*)$", makefile, re.MULTILINE)
    assert set(named.split()) == marked


def test_nothing_of_workers_stays_however_they_end(tmp_path: Path) -> None:
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    settings = ["-n", "1", "--max-worker-restart", "0", "-c", str(ROOT / "pyproject.toml")]

    run = subprocess.run(
        [*command, *settings, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary), "PYTEST_DEBUG_TEMPROOT": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "1 failed, 1 passed" in run.stdout, run.stdout
    left = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(left) == 2
    until(lambda: not any(map(psutil.pid_exists, left)), within_s=30)
    assert not list(temporary.glob("rmq-tests-*"))
