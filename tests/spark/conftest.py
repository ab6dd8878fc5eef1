"""One Spark session for all tests of the process; sessions cannot be had side by side."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from rmq_pipeline.spark import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session with the settings of a window, whose workers have everything imported."""
    from tests.spark.warm_daemon import SETTINGS

    with warnings.catch_warnings():
        # pyspark 4.3 leaves the socket of its launch to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        started = session.start(SETTINGS)
        yield started
        started.stop()
