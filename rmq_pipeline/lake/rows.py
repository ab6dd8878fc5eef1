"""Rows of one message, in sinks whose rows name their message."""

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rmq_pipeline import checked_parquet
from rmq_pipeline.lake import manifest
from rmq_pipeline.storage.place import Place, at

_PLACE: Final = ("queue_id", "queue_offset")


def rows_of_message(sink: Place, *, queue_id: int, queue_offset: int) -> pa.Table | None:
    """Return the current rows of a message, with the file of each in the column ``path``.

    Reads only the files and row groups whose offset ranges include the message.

    Returns:
        None if the files that may hold the message have no queue_id and queue_offset.
    """
    root, parts = at(sink), []
    for file in manifest.read(root).files.to_pylist():
        if not _may_hold(file["offsets"], queue_id, offset=queue_offset):
            continue
        with (
            root.open(manifest.checked(root, file["path"])) as source,
            checked_parquet.open_file(source) as opened,
        ):
            names = set(opened.schema_arrow.names)
            if not names.issuperset(_PLACE):
                continue
            found = _rows(opened, queue_id=queue_id, queue_offset=queue_offset)
            path = pa.repeat(file["path"], found.num_rows)
            parts.append(found.append_column("path", path))
    return pa.concat_tables(parts, promote_options="default") if parts else None


def _may_hold(ranges: list[dict[str, int]] | None, queue_id: int, *, offset: int) -> bool:
    return ranges is None or any(
        each["queue_id"] == queue_id and each["base"] <= offset < each["end"] for each in ranges
    )


def _rows(file: pq.ParquetFile, *, queue_id: int, queue_offset: int) -> pa.Table:
    wanted = {"queue_id": queue_id, "queue_offset": queue_offset}
    groups = [g for g in range(file.num_row_groups) if _group_may_hold(file, g, wanted=wanted)]
    rows = file.read_row_groups(groups)
    chosen = [pc.equal(rows[name], value) for name, value in wanted.items()]
    return rows.filter(pc.and_(*chosen))


def _group_may_hold(file: pq.ParquetFile, group: int, *, wanted: dict[str, int]) -> bool:
    facts = file.metadata.row_group(group)
    for i in range(facts.num_columns):
        column = facts.column(i)
        value = wanted.get(column.path_in_schema)
        known = column.statistics if value is not None else None
        if known is not None and known.has_min_max and not known.min <= value <= known.max:
            return False
    return True
