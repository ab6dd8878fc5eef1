"""Reading a sink as a table: by its manifest, without staged or replaced files.

A list of files is valid for as long as replaced files are retained (ten minutes by default). Read
the list again for each query.
"""

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from rmq_pipeline import checked_parquet
from rmq_pipeline.lake import manifest
from rmq_pipeline.lake.manifest import checked
from rmq_pipeline.storage.local import LocalRoot
from rmq_pipeline.storage.place import Place, at
from rmq_pipeline.storage.root import Root, split

#: Files that are read at a time. Opening a small file takes longer than reading it, especially on a
#: shared file system.
_READERS: Final = 8
#: Most tasks that read the files of another file system.
_TASKS: Final = 16


def sink_paths(sink: Place, *, partitions: Collection[str] | None = None) -> list[str]:
    """Return the paths of the current files, or their URIs, for any reader of Parquet.

    Args:
        sink: the sink's folder.
        partitions: hours such as ``2013-01-01T05``; None: all.
    """
    root = at(sink)
    return [str(root.location(path)) for path in _current(root, partitions)]


def _current(sink: Root, partitions: Collection[str] | None) -> list[str]:
    files = manifest.read(sink).files
    return [
        checked(sink, path)
        for path, partition in zip(
            files["path"].to_pylist(), files["partition"].to_pylist(), strict=True
        )
        if partitions is None or partition in partitions
    ]


def sink_table(
    sink: Place,
    *,
    columns: list[str] | None = None,
    partitions: Collection[str] | None = None,
    sink_schema: pa.Schema | None = None,
) -> pa.Table:
    """Return the current rows, for pyarrow and (``.to_pandas()``) pandas.

    Args:
        sink: the sink's folder.
        columns: None: all.
        partitions: as for ``sink_paths``.
        sink_schema: columns of the result for an empty sink; None: a table without columns.
    """
    root = at(sink)
    paths = _current(root, partitions)

    def read(path: str) -> pa.Table:
        with root.open(path) as file:
            return checked_parquet.read(file, columns=columns)

    # Each is read as a single file, so that its folder's name does not become a column.
    if paths:
        with ThreadPoolExecutor(min(_READERS, len(paths))) as pool:
            parts = pool.map(read, paths)
            return pa.concat_tables(list(parts), promote_options="default")
    empty = (sink_schema or pa.schema([])).empty_table()
    return empty.select(columns) if columns and sink_schema else empty


def duckdb_relation(
    connection: Any,
    sink: Place,
    *,
    partitions: Collection[str] | None = None,
    sink_schema: pa.Schema | None = None,
) -> Any:
    """Return the current rows as a relation of a DuckDB connection; DuckDB reads the files itself.

    DuckDB does not check the pages' checksums; `rmq verify --sink` does. Of a sink on another file
    system pyarrow reads the files into memory, since DuckDB has other credentials than pyarrow.

    Args:
        connection: a DuckDBPyConnection.
        partitions: as for ``sink_paths``.
        sink_schema: the columns of a sink without files.

    Raises:
        ValueError: the sink has no files, and no schema is given.
    """
    if not isinstance(at(sink), LocalRoot):
        found = sink_table(sink, partitions=partitions, sink_schema=sink_schema)
        return connection.from_arrow(found if found.num_columns else _nothing(sink, sink_schema))
    paths = sink_paths(sink, partitions=partitions)
    if not paths:
        return connection.from_arrow(_nothing(sink, sink_schema))
    return connection.read_parquet(paths, hive_partitioning=False, union_by_name=True)


def spark_frame(
    spark: Any,
    sink: Place,
    *,
    partitions: Collection[str] | None = None,
    sink_schema: pa.Schema | None = None,
) -> Any:
    """Return the current rows as a DataFrame; its tasks read the files.

    Of a sink on another file system the tasks read with pyarrow, and with the credentials of their
    own environment: the file systems of Spark are those of Hadoop.

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
    root = at(sink)
    if not isinstance(root, LocalRoot):
        columns = _united(root, _current(root, partitions))
        return read_in_tasks(spark, uris=paths, columns=columns)
    # Given single files, Spark makes no partition column from the name of their folder.
    reader = spark.read.option("mergeSchema", "true").option(checked_parquet.SPARK_OPTION, "true")
    return reader.parquet(*paths)


def _nothing(sink: Place, sink_schema: pa.Schema | None) -> pa.Table:
    if sink_schema is None:
        raise ValueError(
            f"The sink {at(sink)} has no files. Pass sink_schema to read an empty table."
        )
    return sink_schema.empty_table()


def _united(sink: Root, paths: list[str]) -> pa.Schema:
    def schema_of(path: str) -> pa.Schema:
        with sink.open(path) as file:
            return pq.read_schema(file).remove_metadata()

    with ThreadPoolExecutor(min(_READERS, len(paths))) as pool:
        found = list(pool.map(schema_of, paths))
    return pa.unify_schemas(found, promote_options="permissive")


def read_in_tasks(spark: Any, *, uris: list[str], columns: pa.Schema) -> Any:
    """Return these columns of files as a DataFrame; the tasks read them with pyarrow."""
    columns = columns.remove_metadata()

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for folder, name in map(split, batch["uri"].to_pylist()):
                with at(folder).open(name) as source, checked_parquet.open_file(source) as file:
                    for rows in file.iter_batches():
                        parts = [columns.empty_table(), pa.Table.from_batches([rows])]
                        whole = pa.concat_tables(parts, promote_options="permissive")
                        yield from whole.select(columns.names).cast(columns).to_batches()

    frame = spark.createDataFrame(columns.empty_table())
    # Spark makes one task per record batch.
    listed = pa.table({"uri": uris}).to_batches(max_chunksize=-(-len(uris) // _TASKS))
    return spark.createDataFrame(pa.Table.from_batches(listed)).mapInArrow(read, frame.schema)
