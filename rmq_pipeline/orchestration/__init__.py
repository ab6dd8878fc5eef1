"""Dagster: what authors of pipelines import, and what runs the broker's background work."""
