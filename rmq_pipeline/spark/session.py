"""The Spark session of a window: local and small by default, any master allowed."""

import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL_MASTER: Final = "local[2]"

#: Settings of every session; a caller's win over them.
SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.python.worker.reuse": "true",
    # A worker that dies says where.
    "spark.python.worker.faulthandler.enabled": "true",
    "spark.sql.execution.pyspark.udf.faulthandler.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    # A small table would else be cut into a task a core, and a part lose its state to the other.
    "spark.sql.execution.arrow.localRelationThreshold": "0",
    "spark.sql.catalogImplementation": "in-memory",
    # Quick to start: no class cache to check, no second compiler for short plans.
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto",
}


def settings(overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """Spark settings for a window, with ``overrides`` on top."""
    chosen = {"spark.master": LOCAL_MASTER, **SETTINGS, **(overrides or {})}
    if not chosen["spark.master"].startswith("local"):
        for name in ("spark.driver.host", "spark.driver.bindAddress"):
            if name not in (overrides or {}):
                del chosen[name]
    return chosen


def start(overrides: Mapping[str, str] | None = None, *, name: str = "rmq") -> "SparkSession":
    """The session of this process, started when there is none.

    Its workers find our modules, and it knows the format ``rocketmq``.
    """
    from pyspark.sql import SparkSession

    from rmq_pipeline.spark.source import register

    prepare_environment()
    builder = SparkSession.builder.appName(name)
    for key, value in settings(overrides).items():
        builder = builder.config(key, value)
    started = builder.getOrCreate()
    register(started)
    return started


def prepare_environment() -> None:
    """Let Spark's local workers be this Python, with its modules, and bind to the loopback.

    Spark reads these from the environment only; what is set there already is kept.
    """
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    installed = {
        sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    known = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    extra = [
        path
        for path in sys.path
        if Path(path).is_dir() and path not in known and not _within(path, installed)
    ]
    if extra:
        os.environ["PYTHONPATH"] = os.pathsep.join([*known, *extra])


def _within(path: str, folders: set[str]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)
