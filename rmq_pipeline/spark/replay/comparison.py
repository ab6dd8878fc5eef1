"""Comparison of a replay with the present state: rows of sinks, and outcomes of messages."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

#: Column with ``added`` or ``removed``, and column with the number of copies.
CHANGE: Final = "change"
COPIES: Final = "copies"

#: Columns of messages whose outcome has changed.
OUTCOMES: Final = pa.schema(
    [
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("message_id", pa.string()),
        ("message_group", pa.string()),
        ("was", pa.string()),
        ("would_be", pa.string()),
        ("reason", pa.string()),
    ]
)


def rows(
    spark: "SparkSession", *, old: list[Path], new: list[Path], columns: pa.Schema
) -> "DataFrame | None":
    """Return the rows that only one side has: CHANGE, COPIES, and the sink's columns.

    Args:
        spark: the session.
        old: files of the sink.
        new: files of the replay.
        columns: columns of the sink.

    Returns:
        None if there are no files.
    """
    from pyspark.sql import functions as F  # noqa: N812

    sides = [
        _read(spark, files, columns=columns).withColumn(COPIES, F.lit(sign))
        for files, sign in ((old, -1), (new, 1))
        if files
    ]
    if not sides:
        return None
    both = sides[0] if len(sides) == 1 else sides[0].unionByName(sides[1])
    counted = both.groupBy(*columns.names).agg(F.sum(COPIES).cast("int").alias(COPIES))
    change = F.when(F.col(COPIES) > 0, "added").otherwise("removed")
    return counted.filter(F.col(COPIES) != 0).select(
        change.alias(CHANGE), F.abs(COPIES).alias(COPIES), *columns.names
    )


def _read(spark: "SparkSession", files: list[Path], *, columns: pa.Schema) -> "DataFrame":
    read = spark.read.parquet(*(str(file) for file in files))
    return read.select(*(_comparable(read, field) for field in columns))


def _comparable(read: "DataFrame", field: pa.Field) -> "Column":
    """Return a column in a form that can be grouped by; map entries are sorted."""
    from pyspark.sql import functions as F  # noqa: N812

    if field.name not in read.columns:
        return F.lit(None).alias(field.name)
    column = F.col(field.name)
    if pa.types.is_map(field.type):
        column = F.array_sort(F.map_entries(column))
    return column.alias(field.name)


def partitions(changed: "DataFrame", *, partition_time: str, added_only: bool) -> dict[str, int]:
    """Count differing rows by hour, in the form of partition names.

    Args:
        changed: result of ``rows``.
        partition_time: the column that determines the hour.
        added_only: count only rows that the replay adds.
    """
    from pyspark.sql import functions as F  # noqa: N812

    column = F.col(partition_time)
    if dict(changed.dtypes)[partition_time] == "bigint":
        column = F.timestamp_millis(column)
    hour = F.date_format(column, "yyyy-MM-dd'T'HH")
    if added_only:
        changed = changed.filter(F.col(CHANGE) == "added")
    found = changed.groupBy(hour.alias("hour")).agg(F.sum(COPIES).alias("n")).toArrow()
    return dict(sorted(zip(found["hour"].to_pylist(), found["n"].to_pylist(), strict=True)))


def outcomes(messages: "DataFrame", *, was: pa.Table, now: pa.Table) -> pa.Table:
    """Return the messages whose outcome has changed, as OUTCOMES.

    Args:
        messages: messages of the range.
        was: queue_id, queue_offset and reason of the recorded dead letters.
        now: walk.FAILED.
    """
    place = ["queue_id", "queue_offset"]
    recorded = {(row["queue_id"], row["queue_offset"]): row for row in was.to_pylist()}
    found = {(row["queue_id"], row["queue_offset"]): row for row in now.to_pylist()}
    changed = [
        {**row, "was": "dead_letter" if key in recorded else "acked", "would_be": row["outcome"]}
        for key, row in found.items()
        if row["outcome"] != "dead_letter" or key not in recorded
    ]
    healed = [row for key, row in recorded.items() if key not in found]
    if healed:
        spark = messages.sparkSession
        wanted = pa.Table.from_pylist(healed, schema=was.schema).select(place)
        there = messages.join(spark.createDataFrame(wanted), place, "left_semi")
        listed = there.select(*place, "message_id", "message_group").toArrow().to_pylist()
        changed += [
            {
                **row,
                "was": "dead_letter",
                "would_be": "acked",
                "reason": recorded[row["queue_id"], row["queue_offset"]]["reason"],
            }
            for row in listed
        ]
    table = pa.Table.from_pylist(
        [{name: row.get(name) for name in OUTCOMES.names} for row in changed], schema=OUTCOMES
    )
    return table.sort_by([("queue_id", "ascending"), ("queue_offset", "ascending")])


def write_report(changed: "DataFrame", path: Path) -> Path:
    """Write differing rows to one Parquet file; return its path.

    They are sorted by the sink's columns, so a removed row is next to its replacement.
    """
    from pyspark.sql import functions as F  # noqa: N812

    parts = path.with_suffix(".parts")
    columns = [name for name in changed.columns if name not in {CHANGE, COPIES}]
    in_order = changed.coalesce(1).sortWithinPartitions(*columns, F.desc(CHANGE))
    in_order.write.mode("overwrite").parquet(str(parts))
    (part,) = parts.glob("part-*.parquet")
    part.replace(path)
    for left in parts.glob("*"):
        left.unlink()
    for left in parts.glob(".*"):
        left.unlink()
    parts.rmdir()
    return path
