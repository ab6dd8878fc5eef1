"""Bulk consumers as Spark jobs: windows of micro-batches, settled one atomic frame at a time."""
