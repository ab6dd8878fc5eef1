"""A window of ``@python_consumer`` whose run is killed; the rest is in test_consumer.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.sink import read_sink
from rmq_pipeline.orchestration.consumer import python_consumer
from rmq_pipeline.orchestration.resources import BrokerResource
from tests.conftest import Eventually
from tests.orchestration import counting
from tests.orchestration.conftest import Send
from tests.orchestration.killed_window import AT_WORK

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clock() -> Clock:
    return SystemClock()


@pytest.mark.chaos
def test_a_killed_run_leaves_rows_that_the_next_one_completes(
    client: Client, resource: BrokerResource, send: Send, tmp_path: Path, eventually: Eventually
) -> None:
    consumer = counting.declared(python_consumer)(counting.handler)
    consumer.group.ensure(client)
    send("numbers", 6, message_group=list("aaaabb"), born_at_ms=[1_000] * 6)

    command = [sys.executable, "-m", "tests.orchestration.killed_window"]
    with subprocess.Popen(
        [*command, str(resource.address), str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as run:
        try:
            eventually((tmp_path / AT_WORK).exists, within_s=60)
        finally:
            run.kill()
    # Its lease would end by itself after a while.
    client.open_window("consumer/counter", owner="operator", duration_ms=1, takeover=True)
    eventually(lambda: client.due()["groups"]["counter"]["window"] is None)
    metadata = counting.window(consumer, resource, tmp_path, idle_s=0.5)

    rows = read_sink(tmp_path / "counter").to_pylist()
    assert sorted((row["message_group"], row["number"]) for row in rows) == [
        ("a", 1), ("a", 2), ("a", 3), ("a", 4), ("b", 1), ("b", 2),
    ]  # fmt: skip
    assert metadata["epoch"] == 3
    assert metadata["dead_lettered"] == 0


def test_a_window_tells_the_rows_of_the_whole_sink_and_its_hours(
    client: Client, resource: BrokerResource, send: Send, tmp_path: Path
) -> None:
    consumer = counting.declared(python_consumer)(counting.handler)
    consumer.group.ensure(client)
    send("numbers", 3, message_group=list("aab"), born_at_ms=[0, 0, 3_600_000])
    counting.window(consumer, resource, tmp_path, idle_s=0.5)
    send("numbers", 1, message_group=["a"], born_at_ms=[3_600_000])

    second = counting.window(consumer, resource, tmp_path, idle_s=0.5)

    assert (second["rows"], second["dagster/row_count"]) == (1, 4)
    hours = [record.data for record in second["hours"].records]
    assert [(hour["partition"], hour["rows"], hour["files"]) for hour in hours] == [
        ("1970-01-01T01", 2, 2),
        ("1970-01-01T00", 2, 1),
    ]
