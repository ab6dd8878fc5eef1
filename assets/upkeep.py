"""The broker's background work as assets: delivery, revival, checks, sealing."""

from typing import Final

from examples.flights.pipeline import PIPELINE as FLIGHTS
from rmq_pipeline.orchestration.checks import watched_upkeep
from rmq_pipeline.orchestration.operator_jobs import (
    purge_asset,
    purge_job,
    purge_schedule,
    redrive_asset,
    redrive_job,
    unpark_asset,
    unpark_job,
)
from rmq_pipeline.orchestration.sink_compaction import compact_sinks_asset, compact_sinks_job
from rmq_pipeline.orchestration.transaction_checker import JOB as CHECK_JOB
from rmq_pipeline.orchestration.transaction_checker import transaction_check_job, transaction_checks
from rmq_pipeline.orchestration.upkeep_assets import ARCHIVE_JOBS as ARCHIVE
from rmq_pipeline.orchestration.upkeep_assets import (
    archive_assets,
    asset_key,
    upkeep_asset,
    upkeep_job,
)
from rmq_pipeline.orchestration.windows import JOBS

#: Checkers of these pipelines, which the window check_transactions calls.
CHECKERS: Final = FLIGHTS.checkers
_OTHERS: Final = [job for job in JOBS.values() if job.name != CHECK_JOB]
_PLAIN: Final = [job for job in _OTHERS if job.name not in ARCHIVE]
ASSETS: Final = [
    *(upkeep_asset(job) for job in _PLAIN),
    *archive_assets(),
    transaction_checks(CHECKERS),
    purge_asset(),
    redrive_asset(),
    unpark_asset(),
    compact_sinks_asset(FLIGHTS.consumers),
]
#: The broker does this work itself if Dagster does not; the checks then turn red.
WATCHED: Final = [watched_upkeep(name, asset_key(name)) for name in JOBS]
CHECKS: Final = [check for each in WATCHED for check in each.definitions()]
WINDOW_JOBS: Final = [*(upkeep_job(job) for job in _OTHERS), transaction_check_job(CHECKERS)]
PURGE_JOB: Final = purge_job()
REDRIVE_JOB: Final = redrive_job()
UNPARK_JOB: Final = unpark_job()
COMPACT_SINKS_JOB: Final = compact_sinks_job()
PURGE_SCHEDULE: Final = purge_schedule()
