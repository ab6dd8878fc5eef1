"""What Dagster loads for the example of a replay: the rotations, as they should be."""

from examples.flights.replaying import PIPELINE
from rmq_pipeline.dagster import definitions

defs = definitions([PIPELINE], upkeep=False)
