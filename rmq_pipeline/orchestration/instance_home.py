"""Preparation of a DAGSTER_HOME before its processes start: tables exist, lost runs are ended."""

import logging
from pathlib import Path
from typing import Final

import dagster as dg

_RUNNING: Final = (
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)


def prepare(dagster_home: Path) -> list[str]:
    """Create the tables, report runs without a process as failed, and return their ids.

    Call it only while no Dagster process uses the home. Processes that start together on an empty
    home conflict while creating the tables. After a power cut or kill -9 of everything, no other
    process would notice the lost runs. They would occupy their slots forever.
    """
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with dg.DagsterInstance.from_config(str(dagster_home)) as instance:
        lost = instance.get_runs(dg.RunsFilter(statuses=_RUNNING))
        for run in lost:
            instance.report_run_failed(run, "The process of this run was gone at the next start.")
        return [run.run_id for run in lost]
