"""Sensors that start and check the background work of the broker and of the sinks."""

import os
from typing import Final

from assets.upkeep import COMPACT_SINKS_JOB, WATCHED, WINDOW_JOBS
from examples.flights.pipeline import PIPELINE as FLIGHTS
from rmq_pipeline.orchestration.check_sensor import check_sensor
from rmq_pipeline.orchestration.due_work import BUSY_FOR_MS
from rmq_pipeline.orchestration.sensors import due_work_sensor
from rmq_pipeline.orchestration.sink_compaction import compact_sinks_sensor
from rmq_pipeline.orchestration.windows import JOBS

#: RMQ_BUSY_S: windows follow each other while work was due within this many seconds.
_BUSY_FOR_MS: Final = int(1000 * float(os.environ.get("RMQ_BUSY_S", BUSY_FOR_MS / 1000)))
DUE_WORK: Final = due_work_sensor(JOBS, WINDOW_JOBS, busy_for_ms=_BUSY_FOR_MS)
COMPACT_SINKS: Final = compact_sinks_sensor(FLIGHTS.consumers, COMPACT_SINKS_JOB)
UPKEEP_CHECKS: Final = check_sensor(WATCHED, name="upkeep_checks")
