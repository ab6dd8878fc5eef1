"""What every test gets: no settings of the person who runs it, and a way to wait."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# A shared machine of two cores says little about one example's time.
settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")

# Spark asks the network for this machine's address unless it is told one.
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ.setdefault("DAGSTER_DISABLE_TELEMETRY", "1")

Eventually = Callable[..., None]


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
