"""Sinks: a folder of Parquet files in hourly partitions, of which its manifest says what counts.

Tasks stage files under final, unique names; a file counts once a settle has named it. Readers go
by ``_manifest.json``, which is replaced atomically. A sink belongs to one consumer group.
"""

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rmq_pipeline import schema

MANIFEST: Final = "_manifest.json"
MANIFEST_FORMAT: Final = 1
_HOUR_MS: Final = 3_600_000


def stage(sink: Path, rows: pa.Table, *, partition_time: str, epoch: int, batch: int) -> pa.Table:
    """Write rows to new files, one for each hour of their partition time, and sync them.

    Returns:
        schema.SINK_FILE, a row a file; none of them counts yet.
    """
    staged = [
        _write(sink, part, hour=hour, name=f"part-{epoch:06}-{batch:06}-{uuid.uuid4().hex[:12]}")
        for hour, part in _by_hour(rows, partition_time)
    ]
    for folder in {(sink / str(f["path"])).parent for f in staged} | ({sink} if staged else set()):
        _sync_folder(folder)
    return pa.Table.from_pylist(staged, schema=schema.SINK_FILE)


def _by_hour(rows: pa.Table, partition_time: str) -> Iterator[tuple[np.int64, pa.Table]]:
    times = rows[partition_time]
    if pa.types.is_timestamp(times.type):
        times = times.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
    hours = times.to_numpy() // _HOUR_MS
    if hours.min() == hours.max():
        yield hours[0], rows
        return
    order = np.argsort(hours, kind="stable")
    found, starts = np.unique(hours[order], return_index=True)
    ordered = rows.take(pa.array(order))
    stops = [*starts[1:], len(order)]
    for hour, start, stop in zip(found, starts, stops, strict=True):
        yield hour, ordered.slice(start, stop - start)


def _write(sink: Path, rows: pa.Table, *, hour: np.int64, name: str) -> dict[str, Any]:
    partition = str(np.datetime64(int(hour), "h"))
    path = f"hour={partition}/{name}.parquet"
    whole = sink / path
    whole.parent.mkdir(parents=True, exist_ok=True)
    with whole.open("xb") as file:
        pq.write_table(rows, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return {"path": path, "rows": rows.num_rows, "bytes": size, "partition": partition}


def publish_manifest(sink: Path, files: pa.Table) -> None:
    """Let readers see exactly these files, schema.SINK_FILE; repeating it is harmless."""
    listed = files.select(schema.SINK_FILE.names).to_pylist()
    sink.mkdir(parents=True, exist_ok=True)
    temporary = sink / f"{MANIFEST}.{uuid.uuid4().hex[:12]}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({"format": MANIFEST_FORMAT, "files": listed}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(sink / MANIFEST)
    _sync_folder(sink)


def delete_unnamed(sink: Path, files: pa.Table, *, epoch: int) -> list[str]:
    """Delete what windows before ``epoch`` staged and no settle named.

    Args:
        sink: the sink's folder.
        files: those that count, schema.SINK_FILE's columns.
        epoch: files of this epoch and later ones are left alone.

    Returns:
        The paths deleted, relative to the sink.
    """
    named = set(files["path"].to_pylist())
    unnamed = [
        path
        for path in sink.glob("hour=*/part-*.parquet")
        if str(path.relative_to(sink)) not in named and _epoch_of(path) < epoch
    ]
    for path in [*unnamed, *sink.glob(f"{MANIFEST}.*.tmp")]:
        path.unlink(missing_ok=True)
    return [str(path.relative_to(sink)) for path in unnamed]


def delete_staged(sink: Path, staged: pa.Table, *, files: pa.Table) -> None:
    """Delete the files of a batch that was refused, unless ``files`` names them after all."""
    named = set(files["path"].to_pylist())
    for path in staged["path"].to_pylist():
        if path not in named:
            (sink / path).unlink(missing_ok=True)


def sink_files(sink: Path) -> pa.Table:
    """The files that the sink's manifest lists, schema.SINK_FILE; none without a manifest."""
    try:
        listed = json.loads((sink / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return schema.SINK_FILE.empty_table()
    if listed["format"] > MANIFEST_FORMAT:
        raise ValueError(f"{sink / MANIFEST} was written by a newer version.")
    return pa.Table.from_pylist(listed["files"], schema=schema.SINK_FILE)


def read_sink(
    sink: Path, *, sink_schema: pa.Schema | None = None, columns: list[str] | None = None
) -> pa.Table:
    """The rows that count.

    Args:
        sink: the sink's folder.
        sink_schema: what an empty sink gives; None: a table without columns.
        columns: None: all.
    """
    parts = []
    for path in sink_files(sink)["path"].to_pylist():
        # As a file of its own: its folder's name is not to become a column.
        with pq.ParquetFile(sink / path) as file:
            parts.append(file.read(columns=columns))
    if parts:
        return pa.concat_tables(parts)
    empty = (sink_schema or pa.schema([])).empty_table()
    return empty.select(columns) if columns and sink_schema else empty


def _epoch_of(path: Path) -> int:
    epoch = path.name.split("-")[1]
    return int(epoch) if epoch.isdigit() else 0


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
