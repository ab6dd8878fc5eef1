"""The one sensor that starts the broker's background work."""

from typing import Final

from assets.upkeep import WINDOW_JOBS
from rmq_pipeline.orchestration.sensors import due_work_sensor
from rmq_pipeline.orchestration.windows import JOBS

DUE_WORK: Final = due_work_sensor(JOBS, WINDOW_JOBS)
