"""Consumers in Spark: windows of micro-batches, each settled in one atomic frame."""
