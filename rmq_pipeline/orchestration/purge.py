"""Deletion of old runs, which Dagster otherwise keeps forever."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import dagster as dg

from rmq_pipeline.orchestration.upkeep_assets import GROUP

KEEP_DAYS: Final = 7
NAME: Final = "purge_runs"
#: Deleting a run takes about 10 ms; the rest waits for the next purge.
MOST_RUNS: Final = 50_000
_PAGE: Final = 500
_FINISHED: Final = (
    dg.DagsterRunStatus.SUCCESS,
    dg.DagsterRunStatus.FAILURE,
    dg.DagsterRunStatus.CANCELED,
)


class PurgeConfig(dg.Config):
    """Age limits of the runs to keep."""

    keep_days: float = KEEP_DAYS
    #: Failed runs are kept this many times longer.
    keep_failed_factor: float = 4


def purge_asset() -> dg.AssetsDefinition:
    """Return the asset whose run deletes old runs with their events and captured output."""

    @dg.asset(
        key=[GROUP, NAME],
        group_name=GROUP,
        kinds={"dagster"},
        description="Deletes finished runs that are older than a week, failed ones after four.",
    )
    def purge(context: dg.AssetExecutionContext, config: PurgeConfig) -> dg.MaterializeResult[Any]:
        now = datetime.now(UTC)
        keep = timedelta(days=config.keep_days)
        instance = context.instance
        done = purge_runs(instance, statuses=_FINISHED[:1] + _FINISHED[2:], before=now - keep)
        failed = purge_runs(
            instance, statuses=_FINISHED[1:2], before=now - keep * config.keep_failed_factor
        )
        left = instance.get_runs_count()
        return dg.MaterializeResult(
            metadata={"deleted": done, "deleted_failed": failed, "left": left}
        )

    return purge


def purge_runs(
    instance: dg.DagsterInstance,
    *,
    statuses: tuple[dg.DagsterRunStatus, ...],
    before: datetime,
    limit: int = MOST_RUNS,
) -> int:
    """Delete runs with these statuses that were created before a time; return their number."""
    filters = dg.RunsFilter(statuses=list(statuses), created_before=before)
    deleted = 0
    while deleted < limit:
        page = instance.get_runs(filters, limit=min(_PAGE, limit - deleted))
        if not page:
            break
        for run in page:
            instance.delete_run(run.run_id)
            _delete_output(instance, run.run_id)
        deleted += len(page)
    return deleted


def _delete_output(instance: dg.DagsterInstance, run_id: str) -> None:
    """Delete the output of a run, which Dagster does not delete with the run."""
    folder = Path(instance.storage_directory()) / run_id
    if folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)


def purge_job() -> Any:
    """Return the job that purges."""
    return dg.define_asset_job(
        NAME,
        selection=dg.AssetSelection.assets(dg.AssetKey([GROUP, NAME])),
        executor_def=dg.in_process_executor,
        description="Deletes old runs and their events from Dagster's own storage.",
    )


def purge_schedule() -> dg.ScheduleDefinition:
    """Return the schedule: every night at four, running from the start."""
    return dg.ScheduleDefinition(
        name=f"{NAME}_nightly",
        job_name=NAME,
        cron_schedule="0 4 * * *",
        default_status=dg.DefaultScheduleStatus.RUNNING,
    )
