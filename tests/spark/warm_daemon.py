"""Spark's daemon of Python workers, which imports before it forks what every worker needs.

Spark forks a worker to plan each read and write of a Python data source. Each took a second of
processor time to import pandas, Arrow and the library.
"""

from typing import Final

import pandas as pd  # noqa: F401 # imported for the workers
import pyarrow.parquet  # noqa: F401 # imported for the workers
from pyspark.daemon import manager

import rmq_pipeline.flight.client
import rmq_pipeline.spark.source  # noqa: F401 # imported for the workers

#: Of a session with such a daemon.
SETTINGS: Final = {"spark.python.daemon.module": "tests.spark.warm_daemon"}

if __name__ == "__main__":
    manager()
