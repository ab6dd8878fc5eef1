"""Parquet files with page checksums: a flipped bit raises an error and never yields a value.

The library writes and reads all its Parquet files through this module. Files of older versions
have no checksums and are accepted. The footer never has a checksum, so its row counts are compared
with the segment's name. DuckDB 2.0 neither writes nor checks page checksums.
"""

from pathlib import Path
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

Source: TypeAlias = str | Path | pa.NativeFile
#: Makes Spark's reader check page checksums; its writer always writes them.
SPARK_OPTION: Final = "parquet.page.verify-checksum.enabled"


def open_file(source: Source) -> pq.ParquetFile:
    """Open a file for reading.

    Raises:
        OSError, pa.ArrowException: it cannot be read. A damaged page raises when it is read.
    """
    try:
        return pq.ParquetFile(source, page_checksum_verification=True)
    except UnicodeDecodeError as error:
        # pyarrow decodes the names of the columns, and the footer has no checksum.
        raise pa.ArrowInvalid(f"the name of a column is damaged: {error}") from error


def read(source: Source, *, columns: list[str] | None = None) -> pa.Table:
    """Read a file; the name of its folder adds no partition column."""
    with open_file(source) as file:
        return file.read(columns=columns)


def scan(path: Path, wanted: pc.Expression) -> pa.Table:
    """Return the rows of a file for which the condition holds."""
    import pyarrow.dataset as ds

    options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    format_ = ds.ParquetFileFormat(default_fragment_scan_options=options)
    return ds.dataset(path, format=format_).to_table(filter=wanted)


def writer(where: Any, columns: pa.Schema, **options: Any) -> pq.ParquetWriter:
    """Open a file for writing; the options are those of pyarrow's writer."""
    return pq.ParquetWriter(where, columns, write_page_checksum=True, **options)


def write(table: pa.Table, where: Any, **options: Any) -> None:
    """Write a table to a file; the options are those of pyarrow's writer."""
    pq.write_table(table, where, write_page_checksum=True, **options)


def count_rows(file: pq.ParquetFile) -> int:
    """Read a whole file to verify it, and return its number of rows.

    Raises:
        OSError, pa.ArrowException: it is damaged.
    """
    groups = range(file.num_row_groups)
    rows = sum(int(file.read_row_group(group, use_threads=False).num_rows) for group in groups)
    if rows != file.metadata.num_rows:
        raise pa.ArrowInvalid(f"it has {rows} rows, but its footer says {file.metadata.num_rows}")
    return rows
