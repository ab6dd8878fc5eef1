"""A message that ends the process of an ordered push consumer ends in the dead letters, alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.broker.broker import Broker
from rmq_pipeline.flight.server import FlightServer
from tests.consumer.conftest import SMALL
from tests.consumer.dying import DIED, END
from tests.consumer.listening import rows_of

ATTEMPTS = 3


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "home", upkeep="none", settings=SMALL) as broker:
        yield broker


def run(address: str, done: Path, **told: Any) -> int:
    """The consumer's process, to its end."""
    arguments = json.dumps({"address": address, "done": str(done), **told})
    command = [sys.executable, "-m", "tests.consumer.dying", arguments]
    return subprocess.run(command, check=False, timeout=60).returncode


@pytest.mark.parametrize("order", ["key", "queue"])
def test_the_message_that_ends_its_process_is_a_dead_letter_and_no_other_is(
    order: str, broker: Broker, tmp_path: Path
) -> None:
    bodies = [b"0", b"1", END, *(str(i).encode() for i in range(3, 12))]
    broker.create_topic("t", type="fifo", queues=2)
    broker.create_group("g", max_attempts=ATTEMPTS, backoff_ms=[1])
    groups = [f"k{i}" for i in range(len(bodies))]
    broker.send("t", pa.table({"body": bodies, "message_group": groups}))
    done = tmp_path / "done"

    codes: list[int] = []
    with FlightServer(broker) as server:
        while not codes or codes[-1] == DIED:
            assert len(codes) <= ATTEMPTS + 1
            codes.append(run(server.address, done, group="g", topic="t", order=order))

    # The first one counts all that may have been with the listener, each later one the one tried.
    assert codes == [DIED] * ATTEMPTS + [0]
    assert set(done.read_bytes().split()) == set(bodies) - {END}
    (letter,) = rows_of(broker, "dead_letters", "g", "attempts, error_type")
    assert letter == {"attempts": ATTEMPTS, "error_type": "ConsumerDied"}
