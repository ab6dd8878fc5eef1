"""What every test gets: no settings of the person who runs it, and a way to wait.

Temporary files go to one folder a run, which goes with it: a process that is killed, as many are
here, leaves its own behind. So do processes that a test left running, as it does on Ctrl-C. Homes
are in pytest's folders, and go with the test that passes.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil
import pytest
from hypothesis import settings

# A shared machine of two cores says little about one example's time.
settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")

# Spark asks the network for this machine's address unless it is told one.
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ.setdefault("DAGSTER_DISABLE_TELEMETRY", "1")
os.environ["RMQ_SETTINGS"] = str(Path(__file__).with_name("small_homes.toml"))

Eventually = Callable[..., None]

#: Names the folder of the run to all processes below it.
RUN_VARIABLE: Final = "RMQ_TEST_RUN"
#: A run needs less than half of it at any one time.
ROOM_BYTES: Final = 2 << 30


def pytest_configure(config: pytest.Config) -> None:
    """Send temporary files, those of Spark's JVM as well, to a folder of this run."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="rmq-tests-")
    config.add_cleanup(lambda: _clean_up(folder))
    os.environ[RUN_VARIABLE] = folder
    os.environ["TMPDIR"] = os.environ["SPARK_LOCAL_DIRS"] = tempfile.tempdir = folder


def _clean_up(folder: str) -> None:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(RUN_VARIABLE) == folder:
                process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def pytest_runtest_setup() -> None:
    """End the run on a full disk: what fails there says nothing about the code."""
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    if free_bytes < ROOM_BYTES:
        pytest.exit(
            f"The disk is full: {free_bytes >> 20} MiB are left where temporary files go "
            f"({os.environ['PYTEST_DEBUG_TEMPROOT']}), and tests need {ROOM_BYTES >> 20}. "
            "Failures before this one may be due to it.",
            returncode=1,
        )


@pytest.fixture(autouse=True)
def _nobodys_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RMQ_HOME", "RMQ_GRPC", "RMQ_FLIGHT", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A place for a broker's home that does not exist yet."""
    return tmp_path / "home"


@pytest.fixture
def eventually() -> Eventually:
    """Wait until a condition holds, for what another process does; fails after ``within_s``."""

    def wait(condition: Callable[[], object], *, within_s: float = 30.0) -> None:
        give_up_at = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < give_up_at, f"not within {within_s} s"
            time.sleep(0.01)

    return wait
