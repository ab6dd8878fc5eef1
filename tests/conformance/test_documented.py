"""What the page for users says was tried is tried: the programs on it, as they are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rmq_pipeline.flight.client import Client
from tests.conformance import brokers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
PROGRAMS = {"python": [sys.executable, "-W", "ignore", "-c"], "javascript": ["node", "-e"]}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("language", PROGRAMS)
def test_a_program_of_the_page_sends_and_receives(language: str, tmp_path: Path) -> None:
    if language == "javascript" and not shutil.which("node"):
        pytest.skip("node is not installed: nothing runs the Node client")
    modules = str(brokers.node_modules()) if language == "javascript" else ""
    programs = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (program,) = (one for one in programs if "127.0.0.1:8081" in one)
    with brokers.serving(tmp_path / "home") as served:
        with Client(served.flight) as client:
            client.ensure_topic("orders")

        done = subprocess.run(
            [*PROGRAMS[language], program.replace("127.0.0.1:8081", served.grpc)],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "HOME": str(tmp_path), "NODE_PATH": modules},
        )

    words = [line.split()[0] for line in done.stdout.splitlines() if line]
    assert words == ["sent", "received"], done.stderr
    assert done.stdout.rstrip().endswith("hello")
