"""Sinks: a folder of Parquet files in hourly partitions, and a Delta table of the published files.

Tasks stage files under unique final names; a file counts once a settle has named it. Readers use
the manifest (``lake.manifest``). A sink belongs to one consumer group.
"""

import uuid
from collections.abc import Collection, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from rmq_pipeline import checked_parquet
from rmq_pipeline.lake import manifest
from rmq_pipeline.lake.publication import sweep
from rmq_pipeline.lake.readers import sink_table
from rmq_pipeline.storage.place import Place, at
from rmq_pipeline.storage.root import Root

#: Name prefix of a window's files; a window deletes only unnamed files with this prefix.
PART: Final = "part"
_HOUR_MS: Final = 3_600_000
#: Columns of a row's message, in sinks that have them.
OFFSETS: Final = ("queue_id", "queue_offset")


def stage(
    sink: Place,
    rows: pa.Table,
    *,
    partition_time: str,
    epoch: int,
    batch: int,
    messages: pa.Table | None = None,
    prefix: str = PART,
) -> pa.Table:
    """Write rows to new files, one per hour of their partition time, and sync them.

    Args:
        sink: folder of the sink.
        rows: rows with the sink's schema.
        partition_time: the column whose hour is a row's partition.
        epoch: the window's epoch; a later window deletes the files if no settle names them.
        batch: number of the window's batch.
        messages: the messages of the rows, with queue_id and queue_offset; None if unknown.
        prefix: prefix of the file names; ``part`` is for windows.

    Returns:
        schema.SINK_FILE, one row per file; none of them counts yet.
    """
    of_batch = None if messages is None else offset_ranges(messages)
    root, staged = at(sink), []
    for hour, part in _by_hour(rows, partition_time):
        name = f"{prefix}-{epoch:06}-{batch:06}-{uuid.uuid4().hex[:12]}"
        known = all(column in part.column_names for column in OFFSETS)
        offsets = offset_ranges(part) if known and messages is not None else of_batch
        staged.append({**_write(root, part, hour=hour, name=name), "offsets": offsets})
    # Sync the sink too: a concurrent task may have created a folder and not yet synced it.
    if staged:
        root.sync_folders({str(f["path"]).rpartition("/")[0] for f in staged})
    return manifest.as_files(staged)


def offset_ranges(messages: pa.Table) -> list[dict[str, int]]:
    """Return, for each queue, the smallest range of offsets that contains these messages."""
    found = (
        messages.select(OFFSETS)
        .group_by("queue_id")
        .aggregate([("queue_offset", "min"), ("queue_offset", "max")])
        .sort_by("queue_id")
    )
    return [
        {"queue_id": queue_id, "base": first, "end": last + 1}
        for queue_id, first, last in zip(
            found["queue_id"].to_pylist(),
            found["queue_offset_min"].to_pylist(),
            found["queue_offset_max"].to_pylist(),
            strict=True,
        )
    ]


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


def _write(sink: Root, rows: pa.Table, *, hour: np.int64, name: str) -> dict[str, Any]:
    partition = str(np.datetime64(int(hour), "h"))
    path = f"hour={partition}/{name}.parquet"
    sink.create_folder(f"hour={partition}")
    size = sink.write(path, lambda file: checked_parquet.write(rows, file, compression="zstd"))
    return {"path": path, "rows": rows.num_rows, "bytes": size, "partition": partition}


def publish_manifest(sink: Place, files: pa.Table) -> None:
    """Publish exactly these files, unless a later version is already published.

    Args:
        sink: folder of the sink.
        files: schema.SINK_FILE; from the broker's ``sink_files``, or any files for a folder that is
            not a group's sink.
    """
    metadata = files.schema.metadata or {}
    is_done = False
    while not is_done:
        known = manifest.known(sink)
        version = int(metadata.get(b"version", known.version + 1))
        is_done = 0 < version <= known.version or manifest.publish(
            sink, files.replace_schema_metadata({"version": str(version)}), known=known
        )


def delete_unnamed(
    sink: Place, files: pa.Table, *, epoch: int, kept: Collection[str] = ()
) -> list[str]:
    """Delete files that windows before ``epoch`` staged and no settle named.

    Args:
        sink: folder of the sink.
        files: the published files, with the columns of schema.SINK_FILE.
        epoch: files of this epoch and later ones are not deleted.
        kept: paths of replaced files that a reader may still use; not deleted.

    Returns:
        The deleted paths, relative to the sink.
    """
    named = {*files["path"].to_pylist(), *kept}
    return sweep(sink, prefix=PART, epoch=epoch, kept=named)


def sink_files(sink: Place) -> pa.Table:
    """Return the files in the sink's manifest as schema.SINK_FILE; none without a manifest."""
    return manifest.read(sink).files


def read_sink(
    sink: Place, *, sink_schema: pa.Schema | None = None, columns: list[str] | None = None
) -> pa.Table:
    """Return the published rows; see ``lake.readers.sink_table``."""
    return sink_table(sink, columns=columns, sink_schema=sink_schema)
