"""Upkeep windows in process, against a real broker in real time."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dagster as dg
import pytest

from rmq_pipeline.clock import Clock, SystemClock
from rmq_pipeline.errors import FencedError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.orchestration.checks import fallback_check
from rmq_pipeline.orchestration.resources import BrokerResource
from rmq_pipeline.orchestration.upkeep_assets import WindowConfig, asset_key, op_name, upkeep_asset
from rmq_pipeline.orchestration.windows import JOBS, Slice, run_upkeep_window
from tests.conftest import Eventually
from tests.orchestration.conftest import Send

DELIVER = JOBS["deliver_scheduled"]
WINDOW = DELIVER.window


@pytest.fixture
def clock() -> Clock:
    return SystemClock()


@pytest.fixture(autouse=True)
def _later(client: Client) -> None:
    client.create_topic("later", type="delay")


def materialized(result: dg.ExecuteInProcessResult, job: str) -> dict[str, Any]:
    events = result.asset_materializations_for_node(op_name(job))
    assert len(events) <= 1
    if not events:
        return observed(result)
    return {name: value.value for name, value in events[0].metadata.items()}


def observed(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    """The only observation of a run that materialized nothing, and ran no checks."""
    assert not result.get_asset_check_evaluations()
    (metadata,) = (
        event.asset_observation_data.asset_observation.metadata
        for event in result.all_events
        if event.event_type == dg.DagsterEventType.ASSET_OBSERVATION
    )
    return {name: value.value for name, value in metadata.items()}


def materialize(
    resource: BrokerResource, job: str, **config: Any
) -> tuple[dg.ExecuteInProcessResult, dict[str, Any]]:
    result = dg.materialize(
        [upkeep_asset(JOBS[job]), fallback_check(job, asset_key(job))],
        resources={"broker": resource},
        run_config=dg.RunConfig(ops={op_name(job): WindowConfig(overtime_seconds=0, **config)}),
    )
    return result, materialized(result, job)


def test_window_delivers_each_message_at_its_time(
    resource: BrokerResource, client: Client, send: Send
) -> None:
    send("later", 3, delay_level=[1, 1, 1])

    result, metadata = materialize(resource, "deliver_scheduled", seconds=1.5)

    head = sum(queue["max_offset"] for queue in client.describe_topic("later")["offsets"])
    assert result.success
    assert head == 3
    assert metadata["delivered"] == 3
    assert metadata["per_level"] == {"1": 3}
    assert metadata["lateness_max_ms"] >= 0
    assert "data:image/svg+xml;base64," in metadata["chart"]
    assert client.due()["jobs"]["deliver_scheduled"]["window"] is None


def test_window_says_what_it_does_while_it_runs(resource: BrokerResource, send: Send) -> None:
    send("later", 2, delay_level=[1, 1])

    result, _ = materialize(resource, "deliver_scheduled", seconds=1.5)

    observed: list[Any] = [
        event.asset_observation_data.asset_observation.metadata["delivered"].value
        for event in result.all_events
        if event.event_type == dg.DagsterEventType.ASSET_OBSERVATION
    ]
    assert sum(observed) == 2


def test_window_that_is_taken_yields_and_says_so(resource: BrokerResource, client: Client) -> None:
    client.open_window(WINDOW, owner="the other run", duration_ms=60_000)

    result, metadata = materialize(resource, "deliver_scheduled", seconds=1)

    assert result.success
    assert metadata["yielded_to"] == "the other run"


def test_hand_over_takes_the_window_of_that_epoch(resource: BrokerResource, client: Client) -> None:
    old = client.open_window(WINDOW, owner="old", duration_ms=60_000)["epoch"]

    _, metadata = materialize(resource, "deliver_scheduled", seconds=0.1, hand_over_from=old)

    assert metadata["epoch"] == old + 1
    with pytest.raises(FencedError):
        client.renew_window(WINDOW, epoch=old, duration_ms=1_000)


def test_hand_over_yields_to_a_newer_window(resource: BrokerResource, client: Client) -> None:
    old = client.open_window(WINDOW, owner="old", duration_ms=60_000)["epoch"]
    client.open_window(WINDOW, owner="newer", duration_ms=60_000, takeover=True)

    _, metadata = materialize(resource, "deliver_scheduled", seconds=0.1, hand_over_from=old)

    assert metadata["yielded_to"] == "newer"


def test_window_ends_when_it_is_taken_over(
    resource: BrokerResource, client: Client, eventually: Eventually
) -> None:
    def is_open() -> bool:
        return bool(client.due()["jobs"]["deliver_scheduled"]["window"])

    with ThreadPoolExecutor(1) as pool, resource.client() as its_own:
        window = pool.submit(run_upkeep_window, its_own, DELIVER, owner="old", seconds=60)
        eventually(is_open)

        client.open_window(WINDOW, owner="new", duration_ms=60_000, takeover=True)

        assert window.result(timeout=30).handed_over
    assert client.due()["jobs"]["deliver_scheduled"]["window"]["owner"] == "new"


def test_interrupted_window_is_closed(client: Client) -> None:
    class InterruptedRunError(Exception):
        """What a terminated run raises."""

    def interrupt(_: Slice) -> None:
        raise InterruptedRunError

    with pytest.raises(InterruptedRunError):
        run_upkeep_window(client, DELIVER, owner="run", seconds=0.1, observe=interrupt)

    assert client.due()["jobs"]["deliver_scheduled"]["window"] is None


def test_busy_window_waits_for_its_successor(
    client: Client, resource: BrokerResource, send: Send
) -> None:
    send("later", 1, delay_level=[1])
    worked = threading.Event()

    def observe(done: Slice) -> None:
        if done.work:
            worked.set()

    with ThreadPoolExecutor(1) as pool, resource.client() as its_own:
        window = pool.submit(
            run_upkeep_window, its_own, DELIVER, owner="old", seconds=1.2, observe=observe
        )
        assert worked.wait(30)
        client.open_window(WINDOW, owner="new", duration_ms=60_000, takeover=True)

        result = window.result(timeout=30)

    assert result.handed_over
    assert result.work == 1


def test_revive_records_ended_leases(resource: BrokerResource, client: Client, send: Send) -> None:
    client.create_topic("news")
    client.create_group("readers")
    send("news", 2)
    client.receive("readers", "news", invisible_duration_ms=1)

    _, metadata = materialize(resource, "revive", seconds=0.5)

    assert metadata["revived"] == 2


def test_seal_ends_when_nothing_is_left(resource: BrokerResource) -> None:
    result, metadata = materialize(resource, "seal", seconds=30)

    assert result.success
    assert metadata["seconds"] < 20


def test_check_of_the_window_is_green(resource: BrokerResource) -> None:
    result, _ = materialize(resource, "deliver_scheduled", seconds=0.1)

    checks = result.get_asset_check_evaluations()
    assert [(check.check_name, check.passed) for check in checks] == [("no_fallback", True)]


def test_busy_window_without_a_successor_ends(client: Client, send: Send) -> None:
    send("later", 1, delay_level=[1])

    result = run_upkeep_window(client, DELIVER, owner="old", seconds=1.2, overtime=0.5)

    assert not result.handed_over
    assert result.seconds >= 1.2


def test_metadata_is_plain(resource: BrokerResource) -> None:
    _, metadata = materialize(resource, "deliver_scheduled", seconds=0.1)

    assert json.dumps(metadata)
