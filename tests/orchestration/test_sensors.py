"""Sensors against a real broker: nothing, too little, enough, the same tick twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dagster as dg
import pytest

from rmq_pipeline.clock import ManualClock
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.declarations import DeclaredGroup, topic
from rmq_pipeline.orchestration.due_work import HAND_OVER_AFTER_MS
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.sensors import (
    POLL_S,
    POLL_WORKERS,
    consumers_sensor,
    due_work_sensor,
    tick_wait_s,
)
from rmq_pipeline.orchestration.upkeep_assets import WINDOW_TAG, upkeep_asset, upkeep_job
from rmq_pipeline.orchestration.windows import JOBS
from tests.orchestration.conftest import Reads, Send

Tick = Callable[..., dg.SensorResult]
MINUTE_MS = 60_000
GROUP = DeclaredGroup("readers", topic("news"))


@dg.asset
def readers() -> None:
    """Stands for a consumer."""


@pytest.fixture
def ticker(instance: dg.DagsterInstance, resource: BrokerResource) -> Callable[..., Tick]:
    def make(sensor: dg.SensorDefinition) -> Tick:
        def tick(cursor: str | None = None, broker: BrokerResource = resource) -> dg.SensorResult:
            with dg.build_sensor_context(
                instance=instance, cursor=cursor, resources={"broker": broker}
            ) as context:
                result = sensor(context)
            assert isinstance(result, dg.SensorResult)
            return result

        return tick

    return make


@pytest.fixture
def due_work(ticker: Callable[..., Tick]) -> Tick:
    targets = [upkeep_job(job) for job in JOBS.values()]
    return ticker(due_work_sensor(JOBS, targets, poll_s=0.0))


@pytest.fixture
def messages(ticker: Callable[..., Tick]) -> Tick:
    job = dg.define_asset_job("readers_window", selection=[readers])
    return ticker(consumers_sensor([Reads(GROUP, job)], name="readers", poll_s=0.0))


def requests(result: dg.SensorResult) -> list[tuple[str | None, str | None]]:
    return [(request.job_name, request.run_key) for request in result.run_requests or []]


def made(instance: dg.DagsterInstance, result: dg.SensorResult, *assets: Any) -> None:
    """Make the run that was requested, as Dagster does before the tick has ended."""
    (request,) = result.run_requests or []
    selection = [asset.key for asset in assets]
    job = dg.define_asset_job(str(request.job_name), selection=selection)
    defs = dg.Definitions(assets=assets, jobs=[job], resources={"broker": BrokerResource()})
    instance.create_run_for_job(
        defs.resolve_job_def(job.name), status=dg.DagsterRunStatus.STARTING, tags=request.tags
    )


@pytest.fixture
def later(client: Client) -> None:
    client.create_topic("later", type="delay")


def test_due_work_skips_when_nothing_is_due(due_work: Tick) -> None:
    result = due_work()

    assert not requests(result)
    assert "Nothing is due" in str(result.skip_reason)


def test_due_work_says_that_no_broker_answers(due_work: Tick, away: BrokerResource) -> None:
    result = due_work(None, away)

    assert not requests(result)
    assert "rmq up" in str(result.skip_reason)
    assert result.cursor is None


@pytest.mark.usefixtures("later")
def test_due_work_leaves_far_messages_alone(due_work: Tick, send: Send) -> None:
    send("later", 1, delay_level=[5])

    assert not requests(due_work())


@pytest.mark.usefixtures("later")
def test_due_work_requests_one_window_a_kind(due_work: Tick, send: Send) -> None:
    send("later", 3, delay_level=[1, 1, 2])

    result = due_work()

    assert [job for job, _ in requests(result)] == ["deliver_scheduled"]
    assert (result.run_requests or [])[0].tags[WINDOW_TAG] == "deliver_scheduled"


@pytest.mark.usefixtures("later")
def test_due_work_requests_no_second_run_before_the_first_is_up(due_work: Tick, send: Send) -> None:
    send("later", 1, delay_level=[1])

    first = due_work()

    assert requests(first)
    assert not requests(due_work(first.cursor))


@pytest.mark.usefixtures("later")
def test_due_work_requests_no_second_run_when_its_cursor_is_lost(
    due_work: Tick, send: Send, instance: dg.DagsterInstance, clock: ManualClock
) -> None:
    send("later", 1, delay_level=[1])
    first = due_work()
    clock.advance(1_000)

    unprotected = due_work()
    made(instance, first, upkeep_asset(JOBS["deliver_scheduled"]))
    protected = due_work()

    # The key is another one by then: Dagster would make a run of it.
    assert len(requests(unprotected)) == 1
    assert requests(unprotected) != requests(first)
    assert not requests(protected)


@pytest.mark.usefixtures("later")
def test_due_work_hands_a_busy_window_over(
    due_work: Tick, send: Send, client: Client, clock: ManualClock
) -> None:
    send("later", 1, delay_level=[1])
    epoch = client.open_window("upkeep/deliver_scheduled", owner="run", duration_ms=MINUTE_MS)
    first = due_work()
    clock.advance(HAND_OVER_AFTER_MS)

    second = due_work(first.cursor)

    assert not requests(first)
    config = (second.run_requests or [])[0].run_config
    assert config["ops"]["upkeep__deliver_scheduled"]["config"]["hand_over_from"] == epoch["epoch"]


@pytest.mark.usefixtures("later")
def test_due_work_waits_for_a_run_that_starts(
    due_work: Tick, send: Send, instance: dg.DagsterInstance
) -> None:
    send("later", 1, delay_level=[1])
    job = dg.Definitions(
        assets=[upkeep_asset(JOBS["deliver_scheduled"])],
        jobs=[upkeep_job(JOBS["deliver_scheduled"])],
        resources={"broker": BrokerResource()},
    ).resolve_job_def("deliver_scheduled")
    instance.create_run_for_job(
        job, status=dg.DagsterRunStatus.STARTING, tags={WINDOW_TAG: "deliver_scheduled"}
    )

    assert not requests(due_work())


def test_revive_is_requested_for_ended_leases(
    due_work: Tick, send: Send, client: Client, clock: ManualClock
) -> None:
    GROUP.ensure(client)
    send("news")
    client.receive("readers", "news", invisible_duration_ms=5_000)
    before = due_work()
    clock.advance(5_001)

    after = due_work(before.cursor)

    assert not requests(before)
    assert [job for job, _ in requests(after)] == ["revive"]


def test_consumer_sensor_makes_topic_and_group(messages: Tick, client: Client) -> None:
    result = messages()

    assert not requests(result)
    assert client.describe_topic("news")["type"] == "normal"
    assert client.describe_group("readers")["order"] == "none"


def test_consumer_sensor_requests_a_window_for_messages(
    messages: Tick, client: Client, send: Send
) -> None:
    GROUP.ensure(client)
    send("news")

    assert [job for job, _ in requests(messages())] == ["readers_window"]


def test_consumer_sensor_requests_no_second_run_before_the_first_is_up(
    messages: Tick, client: Client, send: Send
) -> None:
    GROUP.ensure(client)
    send("news")

    first = messages()

    assert requests(first)
    assert not requests(messages(first.cursor))


def test_consumer_sensor_requests_no_second_run_when_its_cursor_is_lost(
    messages: Tick,
    client: Client,
    send: Send,
    instance: dg.DagsterInstance,
    clock: ManualClock,
) -> None:
    GROUP.ensure(client)
    send("news")
    first = messages()
    clock.advance(1_000)

    unprotected = messages()
    made(instance, first, readers)
    protected = messages()

    assert len(requests(unprotected)) == 1
    assert requests(unprotected) != requests(first)
    assert not requests(protected)


def test_consumer_sensor_leaves_a_live_window_alone(
    messages: Tick, client: Client, send: Send
) -> None:
    GROUP.ensure(client)
    send("news")
    client.open_window("consumer/readers", owner="run", duration_ms=MINUTE_MS)

    assert not requests(messages())


def test_consumer_sensor_frees_what_a_dead_window_holds(
    messages: Tick, client: Client, send: Send, clock: ManualClock
) -> None:
    GROUP.ensure(client)
    send("news")
    window = client.open_window("consumer/readers", owner="run", duration_ms=MINUTE_MS)
    client.receive(
        "readers",
        "news",
        invisible_duration_ms=60 * MINUTE_MS,
        window=("consumer/readers", window["epoch"]),
    )
    clock.advance(MINUTE_MS + 1)

    result = messages()

    assert [job for job, _ in requests(result)] == ["readers_window"]


def test_consumer_sensor_says_that_no_broker_answers(messages: Tick, away: BrokerResource) -> None:
    assert "rmq up" in str(messages(None, away).skip_reason)


@pytest.mark.parametrize(
    ("settings", "wait_s"),
    [
        ({}, 0.0),
        ({"use_threads": False, "num_workers": 8}, 0.0),
        ({"use_threads": True, "num_workers": POLL_WORKERS - 1}, 0.0),
        ({"use_threads": True, "num_workers": POLL_WORKERS}, POLL_S),
        ({"use_threads": True}, POLL_S),
    ],
)
def test_ticks_wait_for_work_only_where_threads_are_to_spare(
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    wait_s: float,
) -> None:
    monkeypatch.setattr(instance, "get_settings", lambda _key: settings)

    assert tick_wait_s(instance) == wait_s
