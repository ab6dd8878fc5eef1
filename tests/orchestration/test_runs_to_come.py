"""Sensors and the runs that are to come: waited for, and not for longer than they may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest
from dagster._core.storage.runs import SqlRunStorage
from dagster._core.storage.runs.schema import RunsTable

from rmq_pipeline.clock import ManualClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration import sensors
from rmq_pipeline.orchestration.declarations import DeclaredGroup, topic
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.sensors import (
    COMES_UP_WITHIN_S,
    STARTS_WITHIN_S,
    consumers_sensor,
    due_work_sensor,
)
from rmq_pipeline.orchestration.upkeep_assets import WINDOW_TAG, upkeep_job
from rmq_pipeline.orchestration.windows import JOBS
from tests.orchestration.conftest import Reads, Send

STATUS = dg.DagsterRunStatus
GROUP = DeclaredGroup("readers", topic("news"))
MARGIN_S = 15.0

Tick = Callable[..., dg.SensorResult]
Begin = Callable[..., dg.DagsterRun]


@dg.asset
def readers() -> None:
    """Stands for a consumer."""


@dg.job
def window() -> None:
    """Never run: its runs only have a status."""


@pytest.fixture
def begin(instance: dg.DagsterInstance) -> Begin:
    """A run of a window, which came to its state some seconds ago."""

    def begin(name: str, status: dg.DagsterRunStatus, *, since_s: float = 0.0) -> dg.DagsterRun:
        run = instance.create_run_for_job(window, status=status, tags={WINDOW_TAG: name})
        at = (datetime.now(UTC) - timedelta(seconds=since_s)).replace(tzinfo=None)
        storage = instance.run_storage
        assert isinstance(storage, SqlRunStorage)
        with storage.connect() as connection:
            this = RunsTable.c.run_id == run.run_id
            connection.execute(RunsTable.update().where(this).values(update_timestamp=at))
        return run

    return begin


def ticks(
    sensor: dg.SensorDefinition, instance: dg.DagsterInstance, resource: BrokerResource
) -> Tick:
    def tick(cursor: str | None = None) -> dg.SensorResult:
        with dg.build_sensor_context(
            instance=instance, cursor=cursor, resources={"broker": resource}
        ) as context:
            result = sensor(context)
        assert isinstance(result, dg.SensorResult)
        return result

    return tick


@pytest.fixture
def messages(instance: dg.DagsterInstance, resource: BrokerResource, client: Client) -> Tick:
    GROUP.ensure(client)
    job = dg.define_asset_job("readers_window", selection=[readers])
    return ticks(
        consumers_sensor([Reads(GROUP, job)], name="readers", poll_s=0.0), instance, resource
    )


@pytest.fixture
def due_work(instance: dg.DagsterInstance, resource: BrokerResource) -> Tick:
    targets = [upkeep_job(job) for job in JOBS.values()]
    return ticks(due_work_sensor(JOBS, targets, poll_s=0.0), instance, resource)


def requested(result: dg.SensorResult) -> list[str | None]:
    return [request.job_name for request in result.run_requests or []]


def test_a_message_that_came_while_a_run_was_to_come_is_seen_when_that_is_over(
    messages: Tick, begin: Begin, send: Send, instance: dg.DagsterInstance, clock: ManualClock
) -> None:
    run = begin("readers", STATUS.STARTED)
    send("news")
    meanwhile = messages()

    # It ended without the message: its window was closed before.
    instance.report_run_canceled(run)
    clock.advance(1_000)
    afterwards = messages(meanwhile.cursor)

    assert requested(meanwhile) == []
    assert requested(afterwards) == ["readers_window"]
    clock.advance(1_000)
    assert requested(messages(afterwards.cursor)) == []


def test_work_that_came_while_a_run_was_to_come_is_seen_when_that_is_over(
    due_work: Tick,
    begin: Begin,
    send: Send,
    client: Client,
    instance: dg.DagsterInstance,
    clock: ManualClock,
) -> None:
    client.create_topic("later", type="delay")
    send("later", delay_level=[1])
    run = begin("deliver_scheduled", STATUS.STARTED)
    meanwhile = due_work()

    instance.report_run_canceled(run)
    clock.advance(1_000)
    afterwards = due_work(meanwhile.cursor)

    assert requested(meanwhile) == []
    assert requested(afterwards) == ["deliver_scheduled"]
    clock.advance(1_000)
    assert requested(due_work(afterwards.cursor)) == []


@pytest.mark.parametrize(
    ("status", "within_s"),
    [
        (STATUS.NOT_STARTED, COMES_UP_WITHIN_S),
        (STATUS.STARTING, COMES_UP_WITHIN_S),
        (STATUS.STARTED, STARTS_WITHIN_S),
    ],
)
def test_a_run_that_does_not_come_up_is_waited_for_no_longer_than_it_may_take(
    messages: Tick,
    begin: Begin,
    send: Send,
    monkeypatch: pytest.MonkeyPatch,
    status: dg.DagsterRunStatus,
    within_s: float,
) -> None:
    monkeypatch.setattr(sensors, "code_since_s", lambda: 0.0)
    send("news")

    begin("readers", status, since_s=within_s + MARGIN_S)
    given_up = messages()
    begin("readers", status, since_s=within_s - MARGIN_S)
    waited_for = messages()

    assert requested(given_up) == ["readers_window"]
    assert requested(waited_for) == []


@pytest.mark.parametrize("status", [STATUS.NOT_STARTED, STATUS.STARTING, STATUS.STARTED])
def test_a_run_of_an_earlier_code_server_is_not_waited_for(
    messages: Tick,
    begin: Begin,
    send: Send,
    monkeypatch: pytest.MonkeyPatch,
    status: dg.DagsterRunStatus,
) -> None:
    """Runs are its children: after a restart of `rmq up` none of them comes up."""
    monkeypatch.setattr(sensors, "code_since_s", lambda: time.time() - 5.0)
    send("news")

    begin("readers", status, since_s=10.0)
    after_restart = messages()
    begin("readers", status, since_s=1.0)

    assert requested(after_restart) == ["readers_window"]
    assert requested(messages()) == []
