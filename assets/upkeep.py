"""The broker's background work as assets: delivery of scheduled messages, revival, sealing."""

from typing import Final

from rmq_pipeline.orchestration.checks import fallback_check
from rmq_pipeline.orchestration.purge import purge_asset, purge_job, purge_schedule
from rmq_pipeline.orchestration.upkeep_assets import asset_key, upkeep_asset, upkeep_job
from rmq_pipeline.orchestration.windows import JOBS

ASSETS: Final = [*(upkeep_asset(job) for job in JOBS.values()), purge_asset()]
#: The broker falls back to doing these itself.
CHECKS: Final = [fallback_check(name, asset_key(name)) for name in ("deliver_scheduled", "revive")]
WINDOW_JOBS: Final = [upkeep_job(job) for job in JOBS.values()]
PURGE_JOB: Final = purge_job()
PURGE_SCHEDULE: Final = purge_schedule()
