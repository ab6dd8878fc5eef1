"""Dagster integration: the API for authors of pipelines, and the broker's background work."""

from rmq_pipeline import extras

extras.check("dagster")
