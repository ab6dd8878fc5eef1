"""Departures are published exactly once, whatever happens to the broker meanwhile."""

import os
import random
import signal
from pathlib import Path

import pyarrow as pa
import pytest

from rmq_pipeline.cli.supervisor import Supervisor
from rmq_pipeline.errors import OperatorError
from rmq_pipeline.examples.flights.facts import bodies
from rmq_pipeline.examples.flights.publishing import BATCH_ROWS, publish, stored
from rmq_pipeline.flight.client import Client
from tests.waiting import until

TOPIC = "departures"
BATCHES = 120


@pytest.fixture(scope="module")
def messages() -> pa.Table:
    """Five aircraft, in turn."""
    rows = range(BATCHES * BATCH_ROWS - 7)
    return pa.table(
        {
            "body": pa.array([f"{i:06}".encode() for i in rows], pa.binary()),
            "message_group": [f"N{i % 5}" for i in rows],
        }
    )


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.long
def test_every_departure_is_stored_once_when_the_broker_is_killed(
    home: Path, messages: pa.Table
) -> None:
    chance = random.Random(11)  # which batches are followed by a kill
    kill_after = sorted(chance.sample(range(1, BATCHES - 2), 5))
    with Supervisor(home) as supervisor, Client(home=home, retry_s=90) as client:
        client.create_topic(TOPIC, type="fifo", queues=4)

        def kill_now_and_then(count: int) -> None:
            if kill_after and count >= kill_after[0] * BATCH_ROWS:
                kill_after.pop(0)
                # It may not be back yet from the last time.
                until(lambda: supervisor.endpoint.is_alive())  # noqa: PLW0108 - another each time
                os.kill(supervisor.endpoint.pid, signal.SIGKILL)

        publish(client, TOPIC, messages=messages, on_stored=kill_now_and_then)

        found = bodies(client, TOPIC)["body"].to_pylist()
        by_aircraft = {n: [b for b in found if int(b) % 5 == n] for n in range(5)}
    assert supervisor.restarts >= 3
    assert sorted(found) == messages["body"].to_pylist()
    assert all(rows == sorted(rows) for rows in by_aircraft.values())


def test_publishing_goes_on_where_it_ended(home: Path, messages: pa.Table) -> None:
    few = messages.slice(0, 2 * BATCH_ROWS + 3)
    told: list[int] = []
    with Supervisor(home), Client(home=home) as client:
        client.create_topic(TOPIC, type="fifo", queues=4)
        client.send(TOPIC, few.slice(0, BATCH_ROWS))

        publish(client, TOPIC, messages=few, on_stored=told.append)
        publish(client, TOPIC, messages=few, on_stored=told.append)

        assert told == [2 * BATCH_ROWS, 2 * BATCH_ROWS + 3]
        assert stored(client, TOPIC) == few.num_rows


def test_another_producer_is_noticed(home: Path, messages: pa.Table) -> None:
    with Supervisor(home) as supervisor, Client(home=home, retry_s=60) as client:
        client.create_topic(TOPIC, type="fifo", queues=4)

        def disturb(_count: int) -> None:
            client.send(TOPIC, messages.slice(0, 3))
            os.kill(supervisor.endpoint.pid, signal.SIGKILL)

        with pytest.raises(OperatorError, match="somebody else sends to it"):
            publish(client, TOPIC, messages=messages, on_stored=disturb)
