"""The resources broker, sinks and spark of this deployment: RMQ_DEPLOYMENT names it."""

from typing import Any, Final

from rmq_pipeline.orchestration.resources import resources_of

RESOURCES: Final[dict[str, Any]] = resources_of()
