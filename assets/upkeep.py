"""The broker's background work as assets: delivery, revival, checks, sealing."""

from typing import Final

from rmq_pipeline.orchestration.upkeep import Upkeep

UPKEEP: Final = Upkeep()
