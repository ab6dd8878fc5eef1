"""Effects of a replay's rows: comparison, replacement of sink files, or a side sink."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import checked_parquet, schema
from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.lake import publication
from rmq_pipeline.lake.manifest import within
from rmq_pipeline.lake.readers import read_in_tasks
from rmq_pipeline.spark import arrow_transport
from rmq_pipeline.spark.replay import publishing, sinks, tasks
from rmq_pipeline.spark.replay.plan import OUTCOMES, ReplayPlan, ReplayReport
from rmq_pipeline.spark.replay.reading import Wanted
from rmq_pipeline.spark.replay.tasks import hours_part
from rmq_pipeline.spark.replay.topic_log import Range, Settled, Source, dead_lettered
from rmq_pipeline.spark.replay.walk import FAILED
from rmq_pipeline.storage.place import at
from rmq_pipeline.storage.root import Address, below, split

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

#: Column with ``added`` or ``removed``, and column with the number of copies.
CHANGE: Final = "change"
COPIES: Final = "copies"


def differing_rows(
    spark: "SparkSession", *, old: list[Address], new: list[Address], columns: pa.Schema
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
        _read_files(spark, files, columns=columns).withColumn(COPIES, F.lit(sign))
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


def _read_files(spark: "SparkSession", files: list[Address], *, columns: pa.Schema) -> "DataFrame":
    if isinstance(files[0], str):
        read: DataFrame = read_in_tasks(spark, uris=[str(file) for file in files], columns=columns)
    else:
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


def rows_by_hour(changed: "DataFrame", *, partition_time: str, added_only: bool) -> dict[str, int]:
    """Count differing rows by hour, in the form of partition names.

    Args:
        changed: result of ``differing_rows``.
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


def changed_outcomes(messages: "DataFrame", *, was: pa.Table, now: pa.Table) -> pa.Table:
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


def write_rows_report(changed: "DataFrame", path: Address) -> "DataFrame":
    """Write differing rows to one Parquet file, and return them.

    They are sorted by the sink's columns, so a removed row is next to its replacement.
    """
    from pyspark.sql import functions as F  # noqa: N812

    columns = [name for name in changed.columns if name not in {CHANGE, COPIES}]
    in_order = changed.coalesce(1).sortWithinPartitions(*columns, F.desc(CHANGE))
    if not isinstance(path, Path):
        folder, name = split(path)
        found = in_order.toArrow()
        with at(folder).create(name) as file:
            checked_parquet.write(found, file)
        return changed.sparkSession.createDataFrame(found)
    parts = path.with_suffix(".parts")
    in_order.write.mode("overwrite").parquet(str(parts))
    (part,) = parts.glob("part-*.parquet")
    part.replace(path)
    for left in parts.glob("*"):
        left.unlink()
    for left in parts.glob(".*"):
        left.unlink()
    parts.rmdir()
    return changed.sparkSession.read.parquet(str(path))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Sink files and progress of the group at the same moment."""

    #: schema.SINK_FILE of the partitions of the range.
    files: pa.Table
    settled: Settled


@dataclass(frozen=True, slots=True)
class Found:
    """Combined results of the tasks of a walk."""

    #: schema.SINK_FILE: files of the range, and of messages behind the range.
    files: pa.Table
    behind: pa.Table
    #: walk.FAILED.
    failed: pa.Table
    #: Message groups whose state differs from the recorded state.
    differ: pa.Array
    counts: dict[str, int]
    #: topic -> messages to publish, schema.SEND.
    to_publish: dict[str, list[pa.Table]] = field(default_factory=dict)

    @classmethod
    def nothing(cls) -> "Found":
        """Return the result of a walk without messages."""
        files = schema.SINK_FILE.empty_table()
        return cls(files, files, FAILED.empty_table(), pa.array([], pa.string()), {})


def done_before(plan: ReplayPlan, client: Client, *, report: ReplayReport) -> bool:
    """Return True if the replacement was made before; the report then contains its counts."""
    from sqlglot import exp

    query = exp.select("added", "removed").from_("sink_replacements")
    query = query.where(
        exp.column("consumer_group").eq(plan.spec.group),
        exp.column("replacement_id").eq(plan.replacement_id),
    )
    found = client.sql(query.sql("duckdb")).to_pylist()
    if found:
        report.repeated = True
        report.files = len(found[0]["added"] or [])
        report.replaced_files = len(found[0]["removed"] or [])
    return bool(found)


class Effects:
    """Applies the rows of one replay after its range was walked."""

    def __init__(
        self,
        plan: ReplayPlan,
        client: Client,
        *,
        wanted: Range,
        target: Address,
        scratch: Address,
        report: ReplayReport,
    ) -> None:
        self._plan, self._client, self._range = plan, client, wanted
        self._target, self._scratch, self._report = target, scratch, report

    def finish(self, source: Source, *, snapshot: Snapshot, found: Found) -> None:
        """Apply the rows as the plan says.

        Raises:
            RequestError: rows do not belong to the range, or messages of the range have expired.
            SinkChangedError: the files to replace are no longer current.
        """
        if self._plan.mode == "dry_run":
            messages = source.of(lambda segment: segment.may_hold(self._range))
            if messages is not None:
                self._compare(messages, snapshot=snapshot, found=found)
            if self._plan.spec.sink is not None and not self._report.replace_refused:
                self._would_be_refused(snapshot, found)
        elif self._plan.mode == "side_sink":
            self._send(found)
            self._report.replaced_files = sinks.publish_side_sink(
                self._target, found.files, mine=self._plan.side_range
            )
        else:
            self._replace(snapshot, found)

    def _compare(self, messages: "DataFrame", *, snapshot: Snapshot, found: Found) -> None:
        plan, spec, report = self._plan, self._plan.spec, self._report
        was = dead_lettered(self._client, spec.group, topic=spec.topic)
        in_range = messages.filter(self._range.holds())
        report.outcomes = changed_outcomes(in_range, was=was, now=found.failed)
        if report.outcomes.num_rows:
            name = f"outcomes-{plan.label}.parquet"
            with at(plan.folder).create(name) as file:
                checked_parquet.write(report.outcomes, file)
            report.outcomes_report = str(below(plan.folder, name))
        changed = self._changed(
            messages.sparkSession,
            old=snapshot.files["path"].to_pylist(),
            new=found.files,
            folder=self._target,
        )
        if changed is None:
            return
        path = below(plan.folder, f"rows-{plan.label}.parquet")
        written = write_rows_report(changed, path)
        report.rows_report = str(path)
        column = spec.partition_time
        report.changed = rows_by_hour(written, partition_time=column, added_only=False)
        added = rows_by_hour(written, partition_time=column, added_only=True)
        report.rows_added = sum(added.values())
        report.rows_removed = sum(report.changed.values()) - report.rows_added

    def _changed(
        self, spark: "SparkSession", *, old: list[str], new: pa.Table, folder: Address
    ) -> "DataFrame | None":
        spec = self._plan.spec
        if spec.sink is None or spec.sink_schema is None:
            return None
        return differing_rows(
            spark,
            old=[within(spec.sink, path) for path in old],
            new=[below(folder, path) for path in new["path"].to_pylist()],
            columns=spec.sink_schema,
        )

    def _replace(self, snapshot: Snapshot, found: Found) -> None:
        plan, spec = self._plan, self._plan.spec
        assert spec.sink is not None
        try:
            self._check_range(found.files)
            self._check_expired(snapshot.files)
        except RequestError:
            sinks.delete_files(spec.sink, found.files)
            raise
        # Publish before the replay counts as done: if it dies in between, the retry sends the same
        # ids.
        self._send(found)
        removed = snapshot.files["path"].to_pylist()
        if removed or found.files.num_rows:
            publication.replace(
                self._client,
                spec.group,
                sink=spec.sink,
                replacement_id=plan.replacement_id,
                add=found.files,
                remove=removed,
                reason=f"replay {plan.replay_id}",
            )
        self._report.replaced_files = len(removed)
        # Delete files of earlier attempts; this attempt deleted its own files if it lost a race.
        known = [self._client.sink_files(spec.group, removed=gone) for gone in (False, True)]
        paths = [path for files in known for path in files["path"].to_pylist()]
        sinks.sweep(spec.sink, label=plan.label, counting=paths)

    def _send(self, found: Found) -> None:
        self._report.published = publishing.send_published(self._client, found.to_publish)

    def _would_be_refused(self, snapshot: Snapshot, found: Found) -> None:
        try:
            self._check_range(found.files)
            self._check_expired(snapshot.files)
        except RequestError as error:
            self._report.replace_refused = str(error)

    def _check_range(self, files: pa.Table) -> None:
        outside = set(files["partition"].to_pylist()) - set(self._plan.partitions)
        if outside:
            raise RequestError(
                f"The handler returned rows of {len(outside)} partitions outside the range, such as"
                f" {min(outside)}. Nothing was replaced.",
                remedy="Return rows of the replayed hours only.",
            )

    def _check_expired(self, files: pa.Table) -> None:
        """Refuse to replace rows of messages that the topic no longer retains."""
        topic = self._client.describe_topic(self._plan.spec.topic)
        kept = {queue["queue_id"]: queue["min_offset"] for queue in topic["offsets"]}
        if not any(kept.values()):
            return
        for file in files.select(["path", "offsets"]).to_pylist():
            ranges = file["offsets"]
            if ranges is None or any(r["base"] < kept.get(r["queue_id"], 0) for r in ranges):
                raise RequestError(
                    f"{file['path']} may hold rows of messages that have expired. A replacement"
                    " would lose them.",
                    remedy="Replay later hours, or use mode side_sink.",
                )

    def look_behind(
        self, source: Source, *, wanted: Wanted, stretches: pa.Table, found: Found
    ) -> None:
        """Find later partitions that the new state would change."""
        report = self._report
        report.states_differ = len(found.differ)
        if found.behind.num_rows:
            hours = set(found.behind["partition"].to_pylist())
            listed = self._client.sink_files(self._plan.spec.group)
            files = listed.select(["path", "partition"]).to_pylist()
            changed = self._changed(
                source.spark,
                old=[file["path"] for file in files if file["partition"] in hours],
                new=found.behind,
                folder=below(self._scratch, "behind"),
            )
            if changed is not None:
                report.behind_rows = rows_by_hour(
                    changed, partition_time=self._plan.spec.partition_time, added_only=True
                )
        if len(found.differ):
            differ = pc.is_in(stretches["message_group"], found.differ)
            ends = stretches.select(["message_group", "last_queue", "last"]).filter(differ)
            report.later = self._hours_behind(source, wanted, ends=ends)

    def _hours_behind(self, source: Source, wanted: Wanted, *, ends: pa.Table) -> list[str]:
        """Return the hours of these groups' messages behind the range."""
        first: dict[int, int] = {}
        for queue_id, last in zip(
            ends["last_queue"].to_pylist(), ends["last"].to_pylist(), strict=True
        ):
            first[queue_id] = min(last, first.get(queue_id, last))
        # A group that has moved continues in a queue that is not examined before its end.
        files = source.files(lambda segment: segment.end > first.get(segment.queue_id, -1))
        task = partial(
            hours_part,
            wanted=wanted,
            ends=arrow_transport.write(ends, below(self._scratch, "ends.arrow")),
            scratch=self._scratch,
        )
        found = tasks.run_tasks(source.spark, tasks.by_length(files), task=task)
        hours = {hour for table in found.get("hours", []) for hour in table["hour"].to_pylist()}
        return [str(np.datetime64(hour, "h")) for hour in sorted(hours)]
