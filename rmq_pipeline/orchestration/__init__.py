"""Dagster integration: the API for authors of pipelines, and the broker's background work."""

from rmq_pipeline import extras

try:
    import dagster as _dagster  # noqa: F401 - every module below needs it
except ModuleNotFoundError as error:
    raise extras.named(error) from error
