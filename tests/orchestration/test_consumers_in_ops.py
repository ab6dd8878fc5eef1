"""Consumers that go on, in ops that end: the example of docs/consumers.md, as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.resources import BrokerResource
from tests.orchestration.conftest import Send

PAGE = Path(__file__).parents[2] / "docs" / "consumers.md"
N = 300


@pytest.fixture
def clock() -> Clock:
    return SystemClock()


@pytest.fixture
def example(tmp_path: Path) -> Path:
    (code,) = (
        block
        for block in re.findall(r"```python\n(.+?)```", PAGE.read_text(), re.DOTALL)
        if "@dg.op" in block
    )
    file = tmp_path / "orders_done.py"
    file.write_text(code)
    return file


@pytest.mark.slow
def test_ops_consume_what_there_is_and_leave_their_groups(
    client: Client, resource: BrokerResource, send: Send, example: Path
) -> None:
    client.create_topic("orders", type="fifo", queues=3)
    client.create_group("billing", order="message_group")
    client.create_group("audit")
    send("orders", N, message_group=[f"customer-{i % 20}" for i in range(N)])
    home = example.parent / "dagster"
    home.mkdir()

    ran = subprocess.run(
        [Path(sys.executable).parent / "dagster", "job", "execute", "-f", example],
        env={**os.environ, "DAGSTER_HOME": str(home), "RMQ_FLIGHT": str(resource.address)},
        cwd=example.parent,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    for step in ("charge_all", "archive_all"):
        assert re.search(rf"{step} - STEP_SUCCESS", ran.stderr + ran.stdout), ran.stderr
    query = (
        "SELECT consumer_group, sum(committed_offset) AS n FROM progress GROUP BY ALL ORDER BY 1"
    )
    assert client.sql(query).to_pylist() == [
        {"consumer_group": "audit", "n": N},
        {"consumer_group": "billing", "n": N},
    ]
    for group in ("billing", "audit"):
        told = client.describe_group(group)
        assert (told["members"], told["locks"]) == ({}, [])
