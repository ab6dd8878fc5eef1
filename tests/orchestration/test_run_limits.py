"""How long a run may take: windows a while, whatever else runs as long as it needs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import dagster as dg

from rmq_pipeline.examples.flights.definitions import defs
from rmq_pipeline.orchestration.upkeep_assets import WINDOW_MAX_S, WINDOW_TAG
from rmq_pipeline.orchestration.windows import JOBS

SETTINGS = Path(__file__).parents[2] / "dagster_home" / "dagster.yaml"


def tags_of_jobs() -> dict[str, Mapping[str, str]]:
    return {job.name: job.run_tags for job in defs.get_repository_def().get_all_jobs()}


def test_each_window_has_a_limit_and_no_other_run_has_one() -> None:
    tags = tags_of_jobs()

    windows = {name for name in tags if WINDOW_TAG in tags[name]}
    assert windows == {
        *(*JOBS, "compact_sinks"),
        *("aircraft_rotations_window", "late_summary_window", "aircraft_checks_window"),
    }
    assert tags.keys() - windows == {"__ASSET_JOB", "redrive", "unpark", "purge_runs"}
    limits = {name: of_job.get(dg.MAX_RUNTIME_SECONDS_TAG) for name, of_job in tags.items()}
    assert limits == {name: str(WINDOW_MAX_S) if name in windows else None for name in tags}


def test_the_instance_itself_limits_no_run(tmp_path: Path) -> None:
    shutil.copy(SETTINGS, tmp_path)

    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert instance.run_monitoring_enabled
        assert instance.run_monitoring_max_runtime_seconds == 0
