"""Dagster definitions of this checkout: the broker's background work, and no pipeline.

`rmq demo` and `rmq up -m rmq_pipeline.examples.flights.definitions` add the flights example.
"""

import dagster as dg

from assets.upkeep import UPKEEP
from resources.deployments import RESOURCES
from sensors.upkeep import SENSORS

defs = dg.Definitions(
    assets=UPKEEP.assets,
    asset_checks=UPKEEP.checks,
    jobs=UPKEEP.jobs,
    schedules=UPKEEP.schedules,
    sensors=SENSORS,
    resources=RESOURCES,
    # A run is one process. The multiprocess executor would add 1.5 s to each run, and its step
    # worker would outlive a killed run.
    executor=dg.in_process_executor,
)
