"""What `rmq up` says of windows that fail: once, with the reason and when they are tried again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    SensorInstigatorData,
    TickData,
    TickStatus,
)

from rmq_pipeline.orchestration import backoff
from rmq_pipeline.orchestration.backoff import FailureWatch
from rmq_pipeline.orchestration.upkeep_assets import WINDOW_TAG
from tests.orchestration.conftest import CODE_SINCE_S, Ran

STATUS = dg.DagsterRunStatus


@dg.asset
def alarms() -> None:
    carriers: dict[str, str] = {}
    carriers["carrier"]


@dg.asset
def other_alarms() -> None:
    raise ValueError("no such table\nand more")


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def watch(told: list[str]) -> FailureWatch:
    return FailureWatch(Path(), url="http://there", tell=told.append, code_since_s=lambda: 0.0)


def fail(instance: dg.DagsterInstance, asset: dg.AssetsDefinition = alarms) -> str:
    job = dg.define_asset_job("alarms_window", selection=[asset], tags={WINDOW_TAG: "alarms"})
    resolved = dg.Definitions(assets=[asset], jobs=[job]).resolve_job_def("alarms_window")
    return resolved.execute_in_process(instance=instance, raise_on_error=False).run_id


def test_a_failing_window_is_told_once_with_its_error_and_its_recovery(
    watch: FailureWatch, instance: dg.DagsterInstance, told: list[str], ran: Ran
) -> None:
    watch.look_at_runs(instance)
    run_id = fail(instance)
    watch.look_at_runs(instance)
    fail(instance)
    watch.look_at_runs(instance)
    (failed,) = told
    fail(instance, other_alarms)
    watch.look_at_runs(instance)
    ran("alarms", STATUS.SUCCESS, 1e9)
    watch.look_at_runs(instance)
    watch.look_at_runs(instance)

    assert failed.startswith("alarms failed once: KeyError: 'carrier'\n")
    assert "tried again in 20 s" in failed
    assert failed.endswith(f"Log: http://there/runs/{run_id}")
    another, recovered = told[1:]
    assert another.startswith("alarms failed 3 times in a row: ValueError: no such table\n")
    assert recovered == "alarms: a run has succeeded again."


def test_a_lost_run_is_told_with_what_was_reported_of_it(
    watch: FailureWatch, instance: dg.DagsterInstance, told: list[str], ran: Ran
) -> None:
    ran("alarms", STATUS.FAILURE, 1e9)

    watch.look_at_runs(instance)

    assert told[0].startswith("alarms failed once: The run is over.\n")


def test_failed_runs_of_long_ago_are_not_read_again(
    watch: FailureWatch,
    instance: dg.DagsterInstance,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backoff, "OVERLAP", timedelta(0))
    read: list[int] = []
    get = dg.DagsterInstance.get_run_records

    def noted(self: dg.DagsterInstance, *args: Any, **named: Any) -> Any:
        records = get(self, *args, **named)
        read.append(len(records))
        return records

    monkeypatch.setattr(dg.DagsterInstance, "get_run_records", noted)
    for _ in range(3):
        fail(instance)
        read.clear()
        watch.look_at_runs(instance)
        first = read[0]
        read.clear()
        watch.look_at_runs(instance)

        assert (first, read[0]) == (1, 0)
    assert len(told) == 1


def test_a_run_that_is_no_window_is_not_told(
    watch: FailureWatch, instance: dg.DagsterInstance, told: list[str]
) -> None:
    resolved = dg.Definitions(
        assets=[alarms], jobs=[dg.define_asset_job("by_hand", selection=[alarms])]
    ).resolve_job_def("by_hand")
    resolved.execute_in_process(instance=instance, raise_on_error=False)

    watch.look_at_runs(instance)

    assert told == []


@pytest.fixture
def ticked() -> Callable[..., None]:
    """Records a tick of the sensor ``consumers``."""
    location = RegisteredCodeLocationOrigin("here")
    origin = RemoteInstigatorOrigin(RemoteRepositoryOrigin(location, "repository"), "consumers")

    seconds = count()

    def ticked(instance: dg.DagsterInstance, status: TickStatus, skip_reason: str) -> None:
        state = InstigatorState(
            origin, InstigatorType.SENSOR, InstigatorStatus.RUNNING, SensorInstigatorData()
        )
        if not instance.all_instigator_state():
            instance.add_instigator_state(state)
        instance.create_tick(
            TickData(
                instigator_origin_id=state.instigator_origin_id,
                instigator_name="consumers",
                instigator_type=InstigatorType.SENSOR,
                status=status,
                timestamp=CODE_SINCE_S + next(seconds),
                skip_reason=skip_reason,
                selector_id=state.selector_id,
            )
        )

    return ticked


def test_what_a_sensor_does_not_start_is_told_once_and_again_when_it_comes_back(
    watch: FailureWatch, told: list[str], ticked: Callable[..., None]
) -> None:
    lacking = "Not started: alarms: Spark needs a JDK."
    failing = f"{lacking}\nreaders failed once, the last time in run x; the next run starts at 9"
    # An ephemeral instance keeps no ticks.
    with dg.instance_for_test() as instance:
        for said in ("Nothing is due.", lacking, failing, "Nothing is due.", lacking):
            ticked(instance, TickStatus.SKIPPED, said)
            watch.look_at_sensors(instance)

    assert told == [lacking, lacking]
