"""The one sensor that starts the broker's background work."""

import os
from typing import Final

from assets.upkeep import WINDOW_JOBS
from rmq_pipeline.orchestration.due_work import BUSY_FOR_MS
from rmq_pipeline.orchestration.sensors import due_work_sensor
from rmq_pipeline.orchestration.windows import JOBS

#: RMQ_BUSY_S: windows follow each other while work was due within so many seconds.
_BUSY_FOR_MS: Final = int(1000 * float(os.environ.get("RMQ_BUSY_S", BUSY_FOR_MS / 1000)))
DUE_WORK: Final = due_work_sensor(JOBS, WINDOW_JOBS, busy_for_ms=_BUSY_FOR_MS)
