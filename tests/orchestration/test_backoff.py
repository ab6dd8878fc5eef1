"""Windows whose runs fail are tried again less and less often, until one succeeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dagster as dg
import pytest

from rmq_pipeline.clock import ManualClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration import backoff
from rmq_pipeline.orchestration.backoff import FIRST_S, MOST_S, failing, pause_s
from rmq_pipeline.orchestration.declarations import DeclaredGroup, topic
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.sensors import consumers_sensor, due_work_sensor
from rmq_pipeline.orchestration.upkeep_assets import (
    NOTHING_ACKED_TAG,
    YIELDED_TAG,
    upkeep_job,
)
from rmq_pipeline.orchestration.windows import JOBS
from tests.orchestration.conftest import CODE_SINCE_S, Ran, Reads, Send, some_asset

STATUS = dg.DagsterRunStatus
READERS = DeclaredGroup("readers", topic("news"))
WRITERS = DeclaredGroup("writers", topic("news"))


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Turn the clock of the sensors: seconds since the code was loaded."""
    found = {"s": CODE_SINCE_S}
    monkeypatch.setattr(backoff, "code_since_s", lambda: CODE_SINCE_S)
    monkeypatch.setattr(backoff, "now_s", lambda: found["s"])
    return lambda at_s: found.update(s=CODE_SINCE_S + at_s)


def found_in(instance: dg.DagsterInstance) -> backoff.Failing | None:
    return failing(instance, "readers", code_since_s=CODE_SINCE_S)


def test_an_hour_has_at_most_twelve_failed_runs_however_short_they_are() -> None:
    at_s, failures = 0.0, 0
    while at_s < 3600:
        failures += 1
        at_s += pause_s(failures)

    assert failures <= 12
    assert [pause_s(n) for n in (1, 2, 3, 50)] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, MOST_S]


def test_no_run_has_failed(instance: dg.DagsterInstance, ran: Ran) -> None:
    assert found_in(instance) is None
    ran("readers", STATUS.SUCCESS, 1)
    ran("others", STATUS.FAILURE, 2)
    assert found_in(instance) is None


def test_each_failure_in_a_row_doubles_the_pause(instance: dg.DagsterInstance, ran: Ran) -> None:
    ran("readers", STATUS.FAILURE, 0)
    ran("readers", STATUS.SUCCESS, 10)
    ran("readers", STATUS.FAILURE, 100)
    newest = ran("readers", STATUS.FAILURE, 200)

    found = found_in(instance)

    assert found is not None
    assert (found.run_id, found.failures) == (newest, 2)
    assert found.retry_at_s == CODE_SINCE_S + 200 + 2 * FIRST_S


def test_a_success_ends_the_backoff(instance: dg.DagsterInstance, ran: Ran) -> None:
    ran("readers", STATUS.FAILURE, 0)
    ran("readers", STATUS.SUCCESS, 30)

    assert found_in(instance) is None


@pytest.mark.parametrize("tag", [YIELDED_TAG, NOTHING_ACKED_TAG])
def test_a_run_that_did_nothing_ends_no_backoff(
    instance: dg.DagsterInstance, ran: Ran, tag: str
) -> None:
    ran("readers", STATUS.FAILURE, 0)
    ran("readers", STATUS.SUCCESS, 30, **{tag: "true"})
    ran("readers", STATUS.CANCELED, 40)
    ran("readers", STATUS.FAILURE, 60)

    found = found_in(instance)

    assert found is not None
    assert found.failures == 2


def test_code_that_was_loaded_again_begins_with_the_first_pause(
    instance: dg.DagsterInstance, ran: Ran
) -> None:
    for at_s in (-500, -400, -300, -10):
        ran("readers", STATUS.FAILURE, at_s)

    before = failing(instance, "readers", code_since_s=CODE_SINCE_S - 1000)
    now = found_in(instance)

    assert before is not None
    assert now is not None
    assert (before.failures, now.failures) == (4, 1)
    assert now.retry_at_s == CODE_SINCE_S - 10 + FIRST_S


@pytest.fixture
def tick(instance: dg.DagsterInstance, resource: BrokerResource) -> Callable[..., Any]:
    """One tick of a sensor that has forgotten all earlier ones, as after a lost cursor."""

    def tick(sensor: dg.SensorDefinition) -> Any:
        with dg.build_sensor_context(instance=instance, resources={"broker": resource}) as context:
            return sensor(context)

    return tick


def requested(result: dg.SensorResult) -> list[str | None]:
    return [request.job_name for request in result.run_requests or []]


def said(result: dg.SensorResult) -> str:
    assert result.skip_reason is not None
    return result.skip_reason.skip_message or ""


def reads(group: DeclaredGroup, **changes: Any) -> Reads:
    job = dg.define_asset_job(f"{group.name}_window", selection=[some_asset])
    return Reads(group, job, **changes)


def test_a_consumer_that_fails_waits_and_another_does_not(
    tick: Callable[..., Any],
    ran: Ran,
    client: Client,
    send: Send,
    now: Callable[[float], None],
) -> None:
    READERS.ensure(client)
    WRITERS.ensure(client)
    send("news")
    sensor = consumers_sensor([reads(READERS), reads(WRITERS)], name="all", poll_s=0.0)
    failed = ran("readers", STATUS.FAILURE, 100)

    now(100 + FIRST_S - 1)
    early = tick(sensor)
    now(100 + FIRST_S)
    in_time = tick(sensor)

    assert requested(early) == ["writers_window"]
    assert requested(in_time) == ["readers_window", "writers_window"]
    alone = consumers_sensor([reads(READERS)], name="alone", poll_s=0.0)
    now(100)
    assert said(tick(alone)).startswith(
        f"Not started: readers failed once, the last time in run {failed}"
    )


def test_upkeep_that_fails_waits(
    tick: Callable[..., Any],
    ran: Ran,
    client: Client,
    send: Send,
    clock: ManualClock,
    now: Callable[[float], None],
) -> None:
    client.create_topic("later", type="delay")
    send("later", delay_level=[1])
    clock.advance(1_000)
    sensor = due_work_sensor(JOBS, [upkeep_job(job) for job in JOBS.values()], poll_s=0.0)
    ran("deliver_scheduled", STATUS.FAILURE, 0)

    now(1)
    early = tick(sensor)
    now(FIRST_S)

    assert not requested(early)
    assert requested(tick(sensor)) == ["deliver_scheduled"]


def test_a_consumer_that_lacks_something_is_not_started_and_says_the_remedy(
    tick: Callable[..., Any], client: Client, send: Send
) -> None:
    READERS.ensure(client)
    WRITERS.ensure(client)
    send("news")
    without = reads(READERS, lacks=lambda _: "Install a JDK.")

    both = tick(consumers_sensor([without, reads(WRITERS)], name="both", poll_s=0.0))
    alone = tick(consumers_sensor([without], name="alone", poll_s=0.0))

    assert requested(both) == ["writers_window"]
    assert not requested(alone)
    assert said(alone) == "Not started: readers: Install a JDK."


def test_a_group_that_the_broker_refuses_does_not_stop_the_others(
    tick: Callable[..., Any], client: Client, send: Send
) -> None:
    client.create_topic("news")
    client.create_group("readers", order="message_group")
    WRITERS.ensure(client)
    send("news")

    both = tick(consumers_sensor([reads(READERS), reads(WRITERS)], name="both", poll_s=0.0))
    alone = tick(consumers_sensor([reads(READERS)], name="alone", poll_s=0.0))

    assert requested(both) == ["writers_window"]
    assert said(alone).startswith("Not started: readers: Consumer group readers has order")
