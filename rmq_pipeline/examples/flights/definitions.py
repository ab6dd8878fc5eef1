"""Dagster definitions of the flights: `rmq up -m rmq_pipeline.examples.flights.definitions`."""

from rmq_pipeline.dagster import definitions
from rmq_pipeline.examples.flights.pipeline import PIPELINE

defs = definitions([PIPELINE])
