"""Test kit: tests a pipeline with the real broker in this process, without Dagster processes.

The fixture ``rmq`` of the pytest plugin yields a TestBroker (docs/testing.md).
"""

from rmq_pipeline.testing.broker import TestBroker
from rmq_pipeline.testing.draining import DrainResult, FailedMessage

__all__ = ["DrainResult", "FailedMessage", "TestBroker"]
