"""The commit log: its files and frames, their recovery, and reading them again.

It knows neither DuckDB nor the rest of the store.
"""
