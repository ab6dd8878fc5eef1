"""The fixtures of the plugin, also where the installed package has no entry point for it yet."""

from rmq_pipeline.pytest_plugin import rmq, rmq_fork, rmq_settings

__all__ = ["rmq", "rmq_fork", "rmq_settings"]
