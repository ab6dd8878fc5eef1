"""What Dagster loads for the example of a replay: the rotations, as they should be."""

from rmq_pipeline.dagster import definitions
from rmq_pipeline.examples.flights.replaying import PIPELINE

defs = definitions([PIPELINE], upkeep=False)
