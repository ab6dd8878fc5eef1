"""Reading a sink as a table: by its manifest, without staged or replaced files.

A list of files is valid for as long as replaced files are retained (ten minutes by default). Read
the list again for each query.
"""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import checked_parquet
from rmq_pipeline.lake import manifest
from rmq_pipeline.lake.manifest import within

#: Files that are read at a time. Opening a small file takes longer than reading it, especially on a
#: shared file system.
_READERS: Final = 8


def sink_paths(sink: Path | str, *, partitions: Collection[str] | None = None) -> list[str]:
    """Return the paths of the current files, for any reader of Parquet.

    Args:
        partitions: hours such as ``2013-01-01T05``; None: all.
    """
    files = manifest.read(Path(sink)).files
    return [
        str(within(Path(sink), path))
        for path, partition in zip(
            files["path"].to_pylist(), files["partition"].to_pylist(), strict=True
        )
        if partitions is None or partition in partitions
    ]


def sink_table(
    sink: Path | str,
    *,
    columns: list[str] | None = None,
    partitions: Collection[str] | None = None,
    sink_schema: pa.Schema | None = None,
) -> pa.Table:
    """Return the current rows, for pyarrow and (``.to_pandas()``) pandas.

    Args:
        columns: None: all.
        partitions: as for ``sink_paths``.
        sink_schema: columns of the result for an empty sink; None: a table without columns.
    """
    paths = sink_paths(sink, partitions=partitions)
    # Each is read as a single file, so that its folder's name does not become a column.
    if paths:
        with ThreadPoolExecutor(min(_READERS, len(paths))) as pool:
            parts = pool.map(lambda path: checked_parquet.read(path, columns=columns), paths)
            return pa.concat_tables(list(parts), promote_options="default")
    empty = (sink_schema or pa.schema([])).empty_table()
    return empty.select(columns) if columns and sink_schema else empty


def duckdb_relation(
    connection: Any,
    sink: Path | str,
    *,
    partitions: Collection[str] | None = None,
    sink_schema: pa.Schema | None = None,
) -> Any:
    """Return the current rows as a relation of a DuckDB connection; DuckDB reads the files itself.

    DuckDB does not check the pages' checksums; `rmq verify --sink` does.

    Args:
        connection: a DuckDBPyConnection.
        partitions: as for ``sink_paths``.
        sink_schema: the columns of a sink without files.

    Raises:
        ValueError: the sink has no files, and no schema is given.
    """
    paths = sink_paths(sink, partitions=partitions)
    if not paths:
        return connection.from_arrow(_nothing(sink, sink_schema))
    return connection.read_parquet(paths, hive_partitioning=False, union_by_name=True)


def spark_frame(
    spark: Any,
    sink: Path | str,
    *,
    partitions: Collection[str] | None = None,
    sink_schema: pa.Schema | None = None,
) -> Any:
    """Return the current rows as a DataFrame; its tasks read the files.

    Args:
        spark: a SparkSession that reaches the sink's folder.
        partitions: as for ``sink_paths``.
        sink_schema: the columns of a sink without files.

    Raises:
        ValueError: the sink has no files, and no schema is given.
    """
    paths = sink_paths(sink, partitions=partitions)
    if not paths:
        return spark.createDataFrame(_nothing(sink, sink_schema))
    # Given single files, Spark makes no partition column from the name of their folder.
    reader = spark.read.option("mergeSchema", "true").option(checked_parquet.SPARK_OPTION, "true")
    return reader.parquet(*paths)


def _nothing(sink: Path | str, sink_schema: pa.Schema | None) -> pa.Table:
    if sink_schema is None:
        raise ValueError(f"The sink {sink} has no files. Pass sink_schema to read an empty table.")
    return sink_schema.empty_table()
