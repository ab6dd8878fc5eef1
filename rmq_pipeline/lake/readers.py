"""Reading a sink as a table: by its manifest, so that what is staged or replaced is never seen.

A list of files is good for as long as replaced files are kept (ten minutes, by default): read it
again for another query.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rmq_pipeline.lake import manifest


def sink_paths(sink: Path | str, *, partitions: Collection[str] | None = None) -> list[str]:
    """The files that count, as paths that any reader of Parquet takes.

    Args:
        partitions: hours such as ``2013-01-01T05``; None: all.
    """
    files = manifest.read(Path(sink)).files
    return [
        str(Path(sink) / path)
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
    """The rows that count, for pyarrow and (``.to_pandas()``) pandas.

    Args:
        columns: None: all.
        partitions: as for ``sink_paths``.
        sink_schema: what an empty sink gives; None: a table without columns.
    """
    parts = []
    for path in sink_paths(sink, partitions=partitions):
        # As a file of its own: its folder's name is not to become a column.
        with pq.ParquetFile(path) as file:
            parts.append(file.read(columns=columns))
    if parts:
        return pa.concat_tables(parts, promote_options="default")
    empty = (sink_schema or pa.schema([])).empty_table()
    return empty.select(columns) if columns and sink_schema else empty


def duckdb_relation(
    connection: Any,
    sink: Path | str,
    *,
    partitions: Collection[str] | None = None,
    sink_schema: pa.Schema | None = None,
) -> Any:
    """The rows that count, as a relation of a DuckDB connection; DuckDB reads the files itself.

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
    """The rows that count, as a DataFrame; its tasks read the files.

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
    # Files that say of themselves that they lie in one folder: its name is not to be a column.
    return spark.read.option("mergeSchema", "true").parquet(*paths)


def _nothing(sink: Path | str, sink_schema: pa.Schema | None) -> pa.Table:
    if sink_schema is None:
        raise ValueError(f"The sink {sink} has no files: say with sink_schema what it would have.")
    return sink_schema.empty_table()
