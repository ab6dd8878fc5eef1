"""The broker's background work in Dagster: its assets, checks, jobs and sensors, put together."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import dagster as dg

from rmq_pipeline.orchestration.check_sensor import check_sensor
from rmq_pipeline.orchestration.checks import Watched, watched_upkeep
from rmq_pipeline.orchestration.consumer import Consumer
from rmq_pipeline.orchestration.due_work import BUSY_FOR_MS
from rmq_pipeline.orchestration.operator_jobs import (
    purge_asset,
    purge_job,
    purge_schedule,
    redrive_asset,
    redrive_job,
    unpark_asset,
    unpark_job,
)
from rmq_pipeline.orchestration.pipeline import Pipeline
from rmq_pipeline.orchestration.sensors import due_work_sensor
from rmq_pipeline.orchestration.sink_compaction import (
    compact_sinks_asset,
    compact_sinks_job,
    compact_sinks_sensor,
)
from rmq_pipeline.orchestration.transaction_checker import JOB as CHECK_JOB
from rmq_pipeline.orchestration.transaction_checker import (
    TransactionChecker,
    transaction_check_job,
    transaction_checks,
)
from rmq_pipeline.orchestration.upkeep_assets import (
    ARCHIVE_JOBS,
    archive_assets,
    asset_key,
    upkeep_asset,
    upkeep_job,
)
from rmq_pipeline.orchestration.windows import JOBS

#: Windows follow each other while work was due within this many seconds. Default: 600.
BUSY_VARIABLE: Final = "RMQ_BUSY_S"


@dataclass(frozen=True)
class Upkeep:
    """The background work of one broker, and of the pipelines of a code location.

    One code location of a broker has it.
    """

    #: Their checkers resolve half messages, and their sinks are compacted.
    pipelines: Sequence[Pipeline] = ()

    @property
    def checkers(self) -> list[TransactionChecker]:
        """Checkers that the check window calls."""
        return [each for pipeline in self.pipelines for each in pipeline.checkers]

    @property
    def consumers(self) -> list[Consumer]:
        """Consumers whose sinks are compacted."""
        return [each for pipeline in self.pipelines for each in pipeline.consumers]

    @cached_property
    def assets(self) -> list[dg.AssetsDefinition]:
        """An asset of each kind of background work, and of each job for operators."""
        plain = [job for job in JOBS.values() if job.name not in (CHECK_JOB, *ARCHIVE_JOBS)]
        return [
            *(upkeep_asset(job) for job in plain),
            *archive_assets(),
            transaction_checks(self.checkers),
            purge_asset(),
            redrive_asset(),
            unpark_asset(),
            compact_sinks_asset(self.consumers),
        ]

    @cached_property
    def watched(self) -> list[Watched]:
        """What the checks look at: they turn red when the broker had to do the work itself."""
        return [watched_upkeep(name, asset_key(name)) for name in JOBS]

    @cached_property
    def checks(self) -> list[dg.AssetChecksDefinition]:
        """The checks of the assets."""
        return [check for each in self.watched for check in each.definitions()]

    @cached_property
    def window_jobs(self) -> list[Any]:
        """The jobs whose runs are windows, one a kind of background work."""
        others = [upkeep_job(job) for job in JOBS.values() if job.name != CHECK_JOB]
        return [*others, transaction_check_job(self.checkers)]

    @cached_property
    def compact_sinks_job(self) -> Any:
        """The job that merges small files of sinks."""
        return compact_sinks_job()

    @property
    def jobs(self) -> list[Any]:
        """The jobs of the background work, and those for operators."""
        return [
            *self.window_jobs,
            purge_job(),
            redrive_job(),
            unpark_job(),
            self.compact_sinks_job,
        ]

    @property
    def schedules(self) -> list[dg.ScheduleDefinition]:
        """The schedule that deletes old runs."""
        return [purge_schedule()]

    @cached_property
    def sensors(self) -> list[dg.SensorDefinition]:
        """Sensors that start and check the background work."""
        busy_for_ms = int(1000 * float(os.environ.get(BUSY_VARIABLE, BUSY_FOR_MS / 1000)))
        return [
            due_work_sensor(JOBS, self.window_jobs, busy_for_ms=busy_for_ms),
            compact_sinks_sensor(self.consumers, self.compact_sinks_job),
            check_sensor(self.watched, name="upkeep_checks"),
        ]

    def definitions(self) -> dg.Definitions:
        """Return all of it; the resources come from elsewhere."""
        return dg.Definitions(
            assets=self.assets,
            asset_checks=self.checks,
            jobs=self.jobs,
            schedules=self.schedules,
            sensors=self.sensors,
        )
