"""Dagster definitions: the broker's background work, and the flights example."""

import dagster as dg

from assets import upkeep
from examples.flights.pipeline import PIPELINE as FLIGHTS
from resources.deployments import resources
from sensors.upkeep import COMPACT_SINKS, DUE_WORK, UPKEEP_CHECKS

defs = dg.Definitions.merge(
    dg.Definitions(
        assets=upkeep.ASSETS,
        asset_checks=upkeep.CHECKS,
        jobs=[
            *upkeep.WINDOW_JOBS,
            upkeep.PURGE_JOB,
            upkeep.REDRIVE_JOB,
            upkeep.UNPARK_JOB,
            upkeep.COMPACT_SINKS_JOB,
        ],
        schedules=[upkeep.PURGE_SCHEDULE],
        sensors=[DUE_WORK, COMPACT_SINKS, UPKEEP_CHECKS],
        resources=resources(),
        # A run is one process. The multiprocess executor would add 1.5 s to each run, and its step
        # worker would outlive a killed run.
        executor=dg.in_process_executor,
    ),
    FLIGHTS.definitions(),
)
