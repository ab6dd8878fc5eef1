"""The Spark session of a window: small and local by default, with any master on request."""

import logging
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rmq_pipeline.checked_parquet import SPARK_OPTION

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

LOCAL_MASTER: Final = "local[2]"
_LOOPBACK: Final = "127.0.0.1"

#: Settings of every session, on a cluster too; the caller's settings override them.
SETTINGS: Final = {
    "spark.python.worker.reuse": "true",
    # A worker that crashes prints its traceback.
    "spark.python.worker.faulthandler.enabled": "true",
    "spark.sql.execution.pyspark.udf.faulthandler.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # For the data source's option pushFilters.
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    # Otherwise Spark splits a small table into a task per core, and separates a part from its
    # state.
    "spark.sql.execution.arrow.localRelationThreshold": "0",
    "spark.sql.catalogImplementation": "in-memory",
    # Spark checks the page checksums of Parquet files.
    f"spark.hadoop.{SPARK_OPTION}": "true",
}
#: Settings of a session on this machine, in addition.
LOCAL_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    # Fast start: the serial collector, and no second compiler for short plans.
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto",
}
#: Settings of a session on a cluster, in addition. The others are those of spark-defaults.conf.
CLUSTER_SETTINGS: Final = {
    "spark.ui.showConsoleProgress": "false",
    # A task is sent with its messages: at most a batch of limits.BATCH_BYTES.
    "spark.rpc.message.maxSize": "512",
}
#: The oldest Java that Spark 4 supports.
OLDEST_JAVA: Final = 17
_JAVA_REMEDY: Final = (
    f"Install a JDK of version {OLDEST_JAVA} or newer (Debian, Ubuntu: apt-get install "
    f"openjdk-{OLDEST_JAVA}-jre-headless; macOS: brew install openjdk@{OLDEST_JAVA}), set "
    "JAVA_HOME if it is not on the PATH, and restart the process; or set spark.remote of the "
    "resource `spark` to a Spark Connect server."
)
_JAVA_VERSION: Final = re.compile(r'^JAVA_VERSION="(?:1\.)?(\d+)', re.MULTILINE)


def settings(overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the Spark settings for a window, with ``overrides`` applied.

    A Spark Connect server has settings of its own: with spark.remote there are no others.
    """
    if overrides and "spark.remote" in overrides:
        return dict(overrides)
    named = {"spark.master": LOCAL_MASTER, **(overrides or {})}
    place = LOCAL_SETTINGS if is_local(named) else CLUSTER_SETTINGS
    return {**SETTINGS, **place, **named}


def is_local(chosen: Mapping[str, str]) -> bool:
    """Return True if these settings of a session make its tasks run on this machine."""
    if "spark.remote" in chosen:
        return False
    return chosen.get("spark.master", LOCAL_MASTER).startswith("local")


def shares_files(session: "SparkSession") -> bool:
    """Return True if the tasks of a session certainly read the files of this machine."""
    if type(session).__module__.startswith("pyspark.sql.connect"):
        return False  # its server may be anywhere
    return (session.sparkContext.master or "").startswith("local")


def start(overrides: Mapping[str, str] | None = None, *, name: str = "rmq") -> "SparkSession":
    """Return the session of this process; start it if there is none.

    Its workers can import the library, and the format ``rocketmq`` is registered.
    """
    from pyspark.sql import SparkSession

    from rmq_pipeline.spark.source import register

    chosen = settings(overrides)
    prepare_environment(chosen)
    builder = SparkSession.builder.appName(name)
    for key, value in chosen.items():
        builder = builder.config(key, value)
    started = builder.getOrCreate()
    register(started)
    return started


def prepare_environment(chosen: Mapping[str, str] | None = None) -> None:
    """Set the environment of a driver: its address, and this Python and its modules for workers.

    Spark reads these settings from the environment only. Variables that are set already win, except
    a loopback address for a cluster on other machines: its executors would connect to themselves.

    Args:
        chosen: settings of the session; None: those of a local one.
    """
    if is_local(chosen or {}):
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
    elif not _is_on_loopback((chosen or {}).get("spark.master", "")):
        address = os.environ.get("SPARK_LOCAL_IP", "")
        if address.startswith("127."):
            log.info("SPARK_LOCAL_IP=%s is ignored: other machines cannot reach it.", address)
            del os.environ["SPARK_LOCAL_IP"]
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


def _is_on_loopback(master: str) -> bool:
    host = master.partition("://")[2].rpartition(":")[0]
    return host == "localhost" or host.startswith("127.")


def _within(path: str, folders: set[str]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


def java_lacks(environment: Mapping[str, str] = os.environ) -> str:
    """Return why Spark cannot start a JVM, with the remedy; an empty text if it can.

    Looks where Spark's own script looks: in JAVA_HOME if it is set, else on the PATH.
    """
    home = environment.get("JAVA_HOME")
    if home:
        found = shutil.which(str(Path(home) / "bin" / "java"))
        missing = f"JAVA_HOME is {home}, which has no bin/java."
    else:
        found = shutil.which("java", path=environment.get("PATH", ""))
        missing = "There is no java on the PATH, and JAVA_HOME is not set."
    if found is None:
        return f"Spark needs a JDK. {missing} {_JAVA_REMEDY}"
    version = _java_version(Path(found).resolve())
    if version is not None and version < OLDEST_JAVA:
        return (
            f"Spark needs a JDK {OLDEST_JAVA} or newer; {found} is Java {version}. {_JAVA_REMEDY}"
        )
    return ""


def _java_version(java: Path) -> int | None:
    """Return the major version from the JDK's ``release`` file; None if there is none."""
    try:
        stated = _JAVA_VERSION.search((java.parents[1] / "release").read_text(errors="replace"))
    except OSError:
        return None
    return int(stated[1]) if stated else None
