"""What Dagster loads for the example of a replay: the rotations, as they should be."""

import dagster as dg

from examples.flights.replaying import PIPELINE
from resources.deployments import resources

defs = dg.Definitions.merge(
    dg.Definitions(resources=resources(), executor=dg.in_process_executor),
    PIPELINE.definitions(),
)
