"""A DAGSTER_HOME before its processes start: tables are there, lost runs are over."""

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
    """Make the tables, and report runs as failed that no process can be working on; their ids.

    To be called only while no Dagster process uses the home. Processes that start together on an
    empty home get in each other's way while making the tables. And of a run whose process went
    without a word (a power cut, kill -9 of everything) nobody else would notice: it would hold
    its slot for ever.
    """
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with dg.DagsterInstance.from_config(str(dagster_home)) as instance:
        lost = instance.get_runs(dg.RunsFilter(statuses=_RUNNING))
        for run in lost:
            instance.report_run_failed(run, "The process of this run was gone at the next start.")
        return [run.run_id for run in lost]
