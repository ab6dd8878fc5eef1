"""A broker is kept running until it is stopped."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rmq_pipeline.cli.supervisor import Supervisor
from rmq_pipeline.endpoint import Endpoint
from rmq_pipeline.errors import ConflictError, OperatorError, RocketMQError
from rmq_pipeline.flight import process
from rmq_pipeline.flight.client import Client
from tests.conftest import Eventually


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def failures() -> list[RocketMQError]:
    return []


@pytest.fixture
def supervisor(home: Path, told: list[str], failures: list[RocketMQError]) -> Iterator[Supervisor]:
    supervisor = Supervisor(home, tell=told.append, on_failure=failures.append, retry_s=0.01)
    with supervisor:
        yield supervisor


def kill(endpoint: Endpoint) -> None:
    os.kill(endpoint.pid, signal.SIGKILL)


def test_a_broker_that_dies_is_started_again_at_its_address(
    supervisor: Supervisor, told: list[str], eventually: Eventually
) -> None:
    first = supervisor.endpoint

    with Client(home=supervisor.home) as client:
        client.create_topic("kept")
        kill(first)
        eventually(lambda: supervisor.restarts == 1)

        assert client.describe_topic("kept")["name"] == "kept"
    assert supervisor.endpoint.flight == first.flight
    assert supervisor.endpoint.upkeep == "dagster"
    assert supervisor.endpoint.pid != first.pid
    assert told[0].startswith("The broker died; it is back as process")


def test_a_broker_that_was_stopped_stays_stopped(
    supervisor: Supervisor, told: list[str], eventually: Eventually
) -> None:
    process.stop(supervisor.home)
    eventually(lambda: told)

    assert "was stopped" in told[0]
    assert process.serving(supervisor.home) is None
    started = process.start(supervisor.home)
    eventually(lambda: supervisor.endpoint == started)
    kill(started)
    eventually(lambda: supervisor.restarts == 1)


def test_stop_ends_the_broker(home: Path) -> None:
    with Supervisor(home) as supervisor:
        pid = supervisor.endpoint.pid

    assert not psutil.pid_exists(pid)
    assert Endpoint.read(home) is None


def test_a_broker_left_running_is_taken_over(home: Path) -> None:
    left = process.start(home, upkeep="dagster")

    with Supervisor(home) as supervisor:
        assert supervisor.endpoint == left

    assert process.serving(home) is None


def test_a_broker_with_another_upkeep_is_left_alone(home: Path) -> None:
    other = process.start(home, upkeep="self")

    with pytest.raises(ConflictError, match="upkeep self"):
        Supervisor(home).start()

    assert process.serving(home) == other
    process.stop(home)


def test_a_broker_with_other_settings_is_left_alone(home: Path) -> None:
    other = process.start(home, upkeep="dagster")

    with pytest.raises(ConflictError, match="other settings"):
        Supervisor(home, settings={"seal_after_ms": 1}).start()

    assert process.serving(home) == other
    process.stop(home)


def test_settings_outlive_the_death_of_a_broker(home: Path, eventually: Eventually) -> None:
    with (
        Supervisor(home, settings={"seal_after_ms": 1, "reserve_bytes": 0}) as supervisor,
        Client(home=home) as client,
    ):
        kill(supervisor.endpoint)
        eventually(lambda: supervisor.restarts == 1)

        assert client.status()["settings"]["seal_after_ms"] == 1


def test_a_broker_that_does_not_start_is_given_up(
    supervisor: Supervisor, failures: list[RocketMQError], eventually: Eventually
) -> None:
    (supervisor.home / "format").write_text("99")

    kill(supervisor.endpoint)

    eventually(lambda: failures, within_s=60)
    assert isinstance(failures[0], OperatorError)
    assert supervisor.restarts == 0
