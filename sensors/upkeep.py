"""Sensors that start and check the background work of the broker and of the sinks."""

from typing import Final

from assets.upkeep import UPKEEP

SENSORS: Final = UPKEEP.sensors
