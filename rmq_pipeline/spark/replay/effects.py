"""What becomes of a replay's rows: compared, put in the place of others, or into another sink."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rmq_pipeline import schema
from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.lake import publication
from rmq_pipeline.spark import parcel
from rmq_pipeline.spark.replay import comparison, onward, side_sink, staged, stages
from rmq_pipeline.spark.replay.plan import ReplayPlan, ReplayReport
from rmq_pipeline.spark.replay.reading import Wanted
from rmq_pipeline.spark.replay.settled import Settled, dead_lettered
from rmq_pipeline.spark.replay.source import Source
from rmq_pipeline.spark.replay.task import hours_part
from rmq_pipeline.spark.replay.topic_log import Range
from rmq_pipeline.spark.replay.walk import FAILED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The sink and the progress of the group, of one moment."""

    #: schema.SINK_FILE of the partitions of the range.
    files: pa.Table
    settled: Settled


@dataclass(frozen=True, slots=True)
class Found:
    """What the tasks of a walk found."""

    #: schema.SINK_FILE of the range, and of the messages behind it.
    files: pa.Table
    behind: pa.Table
    #: walk.FAILED.
    failed: pa.Table
    #: Message groups whose state is not the recorded one.
    differ: pa.Array
    counts: dict[str, int]
    #: topic -> messages to be sent onward, schema.SEND.
    onward: dict[str, list[pa.Table]] = field(default_factory=dict)

    @classmethod
    def nothing(cls) -> "Found":
        """Of no messages."""
        files = schema.SINK_FILE.empty_table()
        return cls(files, files, FAILED.empty_table(), pa.array([], pa.string()), {})


def done_before(plan: ReplayPlan, client: Client, *, report: ReplayReport) -> bool:
    """Whether this replacement was made; the report then says what it was."""
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
    """What one replay does once its range is walked."""

    def __init__(
        self,
        plan: ReplayPlan,
        client: Client,
        *,
        wanted: Range,
        target: Path,
        scratch: Path,
        report: ReplayReport,
    ) -> None:
        self._plan, self._client, self._range = plan, client, wanted
        self._target, self._scratch, self._report = target, scratch, report

    def finish(self, source: Source, *, snapshot: Snapshot, found: Found) -> None:
        """Do with the rows what the plan says.

        Raises:
            RequestError: rows do not belong to the range, or messages of it are gone.
            SinkChangedError: the files to be replaced do not count any more.
        """
        if self._plan.mode == "dry_run":
            messages = source.of(lambda segment: segment.may_hold(self._range))
            if messages is not None:
                self._compare(messages, snapshot=snapshot, found=found)
        elif self._plan.mode == "side_sink":
            self._send(found)
            self._report.replaced_files = side_sink.publish(
                self._target, found.files, mine=self._plan.side_range
            )
        else:
            self._replace(snapshot, found)

    def _compare(self, messages: "DataFrame", *, snapshot: Snapshot, found: Found) -> None:
        plan, spec, report = self._plan, self._plan.spec, self._report
        was = dead_lettered(self._client, spec.group, topic=spec.topic)
        in_range = messages.filter(self._range.holds())
        report.outcomes = comparison.outcomes(in_range, was=was, now=found.failed)
        if report.outcomes.num_rows:
            path = plan.folder / f"outcomes-{plan.label}.parquet"
            pq.write_table(report.outcomes, path)
            report.outcomes_report = str(path)
        changed = self._changed(
            messages.sparkSession,
            old=snapshot.files["path"].to_pylist(),
            new=found.files,
            folder=self._target,
        )
        if changed is None:
            return
        path = comparison.write_report(changed, plan.folder / f"rows-{plan.label}.parquet")
        report.rows_report = str(path)
        written = messages.sparkSession.read.parquet(str(path))
        column = spec.partition_time
        report.changed = comparison.partitions(written, partition_time=column, added_only=False)
        added = comparison.partitions(written, partition_time=column, added_only=True)
        report.rows_added = sum(added.values())
        report.rows_removed = sum(report.changed.values()) - report.rows_added

    def _changed(
        self, spark: "SparkSession", *, old: list[str], new: pa.Table, folder: Path
    ) -> "DataFrame | None":
        spec = self._plan.spec
        if spec.sink is None or spec.sink_schema is None:
            return None
        return comparison.rows(
            spark,
            old=[spec.sink / path for path in old],
            new=[folder / path for path in new["path"].to_pylist()],
            columns=spec.sink_schema,
        )

    def _replace(self, snapshot: Snapshot, found: Found) -> None:
        plan, spec = self._plan, self._plan.spec
        assert spec.sink is not None
        try:
            self._check_range(found.files)
            self._check_expired(snapshot.files)
        except RequestError:
            staged.delete(spec.sink, found.files)
            raise
        # Before the replay counts as done: one that ends in between sends the same ids again.
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
        # Of earlier attempts; those of this one that lost a race were deleted.
        known = [self._client.sink_files(spec.group, removed=gone) for gone in (False, True)]
        paths = [path for files in known for path in files["path"].to_pylist()]
        staged.sweep(spec.sink, label=plan.label, counting=paths)

    def _send(self, found: Found) -> None:
        self._report.published = onward.send_onward(
            self._client, found.onward, replay_id=self._plan.replay_id
        )

    def _check_range(self, files: pa.Table) -> None:
        outside = set(files["partition"].to_pylist()) - set(self._plan.partitions)
        if outside:
            raise RequestError(
                f"The handler made rows of {len(outside)} partitions that are not those of the"
                f" range, such as {min(outside)}: nothing was replaced."
            )

    def _check_expired(self, files: pa.Table) -> None:
        """Refuse to replace rows of messages that the topic does not keep any more."""
        topic = self._client.describe_topic(self._plan.spec.topic)
        kept = {queue["queue_id"]: queue["min_offset"] for queue in topic["offsets"]}
        if not any(kept.values()):
            return
        for file in files.select(["path", "offsets"]).to_pylist():
            ranges = file["offsets"]
            if ranges is None or any(r["base"] < kept.get(r["queue_id"], 0) for r in ranges):
                raise RequestError(
                    f"{file['path']} may hold rows of messages that have expired: replaced, they"
                    " would be lost."
                )

    def look_behind(
        self, source: Source, *, wanted: Wanted, stretches: pa.Table, found: Found
    ) -> None:
        """Find the later partitions that the new state would change."""
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
                folder=self._scratch / "behind",
            )
            if changed is not None:
                report.behind_rows = comparison.partitions(
                    changed, partition_time=self._plan.spec.partition_time, added_only=True
                )
        if len(found.differ):
            differ = pc.is_in(stretches["message_group"], found.differ)
            ends = stretches.select(["message_group", "last_queue", "last"]).filter(differ)
            report.later = self._hours_behind(source, wanted, ends=ends)

    def _hours_behind(self, source: Source, wanted: Wanted, *, ends: pa.Table) -> list[str]:
        """The hours of what these message groups have behind the range."""
        first: dict[int, int] = {}
        for queue_id, last in zip(
            ends["last_queue"].to_pylist(), ends["last"].to_pylist(), strict=True
        ):
            first[queue_id] = min(last, first.get(queue_id, last))
        # A group that has moved since goes on in a queue that is not looked at before its end.
        files = source.files(lambda segment: segment.end > first.get(segment.queue_id, -1))
        task = partial(
            hours_part,
            wanted=wanted,
            ends=parcel.write(ends, self._scratch / "ends.arrow"),
            scratch=self._scratch,
        )
        found = stages.run(source.spark, stages.by_length(files), task=task)
        hours = {hour for table in found.get("hours", []) for hour in table["hour"].to_pylist()}
        return [str(np.datetime64(hour, "h")) for hour in sorted(hours)]
