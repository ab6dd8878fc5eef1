"""Writes the archive of Spark's classes that the JVMs of a test run map instead of loading them.

``make test`` calls it once per installation. Without the archive each JVM reads, checks and links
ten thousand classes of its own, which takes it ten seconds of processor time.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from rmq_pipeline.spark import session


def main(archive: Path) -> None:
    """Run a small job, and let its JVM write the classes that it loaded.

    Without a JDK there is no archive, and the tests of Spark say what is missing.
    """
    if session.java_lacks():
        return
    # Written beside it first: a run that is stopped leaves no half an archive.
    unfinished = archive.with_suffix(".new")
    os.environ["SPARK_SUBMIT_OPTS"] = f"-XX:ArchiveClassesAtExit={unfinished} -Xlog:disable"
    with tempfile.TemporaryDirectory() as folder:
        _work(Path(folder))
    if unfinished.exists():
        unfinished.replace(archive)


def _work(folder: Path) -> None:
    """Do what windows do: rows through Python, into Parquet, and grouped."""
    from pyspark import SparkContext

    spark = session.start()
    rows = spark.createDataFrame(pa.table({"key": ["a", "b"], "number": [1, 2]}))
    rows.mapInArrow(_unchanged, "key string, number long").write.parquet(f"{folder}/rows")
    found = spark.read.parquet(f"{folder}/rows").groupBy("key").sum("number").orderBy("key")
    assert found.toArrow().num_rows == 2
    gateway = SparkContext._gateway  # noqa: SLF001 # no public name waits for the JVM
    assert gateway is not None
    spark.stop()
    # The JVM writes its archive when it ends, and ends when its input does.
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


def _unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
