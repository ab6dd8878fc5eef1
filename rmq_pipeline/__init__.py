"""A message system with RocketMQ's semantics whose state is DuckDB and Parquet."""

__version__ = "0.1.0"
