"""Dagster definitions of the flights: `rmq up -m examples.flights.definitions` in a checkout."""

from examples.flights.pipeline import PIPELINE
from rmq_pipeline.dagster import definitions

defs = definitions([PIPELINE])
