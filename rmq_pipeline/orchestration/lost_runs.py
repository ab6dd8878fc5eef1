"""Runs whose process is gone without a word: a power cut, or kill -9 of a whole session."""

from pathlib import Path
from typing import Final

import dagster as dg

_RUNNING: Final = (
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)


def fail_lost_runs(dagster_home: Path) -> list[str]:
    """Report the runs of a home as failed that no process can be working on; their ids.

    Nobody else notices: the launcher has no health check, and such runs would hold their slots
    for ever. To be called only while no Dagster process uses the home.
    """
    if not (dagster_home / "history").exists():
        return []
    with dg.DagsterInstance.from_config(str(dagster_home)) as instance:
        lost = instance.get_runs(dg.RunsFilter(statuses=_RUNNING))
        for run in lost:
            instance.report_run_failed(run, "The process of this run was gone at the next start.")
        return [run.run_id for run in lost]
