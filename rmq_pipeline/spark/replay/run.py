"""Replay: a range of a topic is handled again, next to the live group.

Spark's tasks read the messages from the segments. The group's progress, leases and state are not
changed. Messages that the handler publishes are sent only if the plan says so.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.handling.group_walk import Rules
from rmq_pipeline.spark import arrow_transport
from rmq_pipeline.spark.replay import publishing, sinks, tasks
from rmq_pipeline.spark.replay.effects import Effects, Found, Snapshot, done_before
from rmq_pipeline.spark.replay.plan import ReplayPlan, ReplayReport
from rmq_pipeline.spark.replay.reading import Wanted
from rmq_pipeline.spark.replay.tasks import (
    PUBLISHED,
    Assignment,
    count_part,
    partition_part,
    place_part,
    walk_part,
)
from rmq_pipeline.spark.replay.topic_log import PLACE, Range, Settled, Source, TopicLog, settled
from rmq_pipeline.spark.replay.walk import (
    FAILED,
    BoundaryState,
    ReplayRules,
    find_boundary_state,
    merge_firsts_and_lasts,
)
from rmq_pipeline.storage.place import delete_temporary, make_temporary
from rmq_pipeline.storage.root import Address, below

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Progress = Callable[[str, dict[str, Any]], None]

#: Maximum number of attempts to read sink and progress at the same moment.
_LOOKS: Final = 100


class Replay:
    """One replay; call ``run`` once."""

    def __init__(
        self,
        plan: ReplayPlan,
        client: Client,
        *,
        spark: "Callable[[], SparkSession]",
        on_progress: Progress,
    ) -> None:
        self._plan, self._client, self._spark = plan, client, spark
        self._tell = on_progress
        self._scratch: Address = Path()
        self.report = ReplayReport(
            mode=plan.mode, replay_id=plan.replay_id, from_ms=plan.from_ms, to_ms=plan.to_ms
        )
        self._log = TopicLog(client, plan.spec.topic)
        self._range = Range(
            topic=plan.spec.topic,
            from_ms=plan.from_ms,
            to_ms=plan.to_ms,
            partition_time=str(self._log.described["partition_time"]),
        )
        if plan.mode == "replace":
            plan.check_partitions(self._range.partition_time)
        elif plan.mode == "dry_run":
            self._would_be_refused()

    def _would_be_refused(self) -> None:
        try:
            self._plan.check_partitions(self._range.partition_time)
        except RequestError as error:
            self.report.replace_refused = str(error)

    def run(self) -> None:
        """Walk the range, and apply its rows as the plan says."""
        started = time.monotonic()
        plan = self._plan
        if plan.mode == "replace" and done_before(plan, self._client, report=self.report):
            return
        self._scratch = make_temporary(plan.folder, prefix="replay-")
        try:
            self._replay()
        finally:
            delete_temporary(self._scratch)
        self.report.seconds = time.monotonic() - started

    def _replay(self) -> None:
        if self._plan.side_sink is not None:
            sinks.check_side_sink(self._plan.side_sink, self._plan.side_range)
        if self._plan.publish:
            publishing.check_publish_topics(self._client, self._plan.spec.publishes)
        snapshot = self._snapshot()
        # Listed after the snapshot: the list then includes all settled messages.
        self._log = TopicLog(self._client, self._plan.spec.topic)
        started = time.monotonic()
        source = self._source(snapshot.settled)
        found, boundary = Found.nothing(), None
        if source.files(lambda segment: segment.may_hold(self._range)):
            self._count_open(source, snapshot.settled)
            boundary = self._boundary(source)
            found = self._walk(source, boundary)
        self._count(found)
        self._tell("walked", dict(found.counts))
        effects = Effects(
            self._plan,
            self._client,
            wanted=self._range,
            target=self._target(),
            scratch=self._scratch,
            report=self.report,
        )
        effects.finish(source, snapshot=snapshot, found=found)
        if boundary is not None:
            settled_only = self._wanted(source, boundary=None)
            effects.look_behind(
                source, wanted=settled_only, stretches=boundary.stretches, found=found
            )
        self.report.spark_s = time.monotonic() - started

    def _count(self, found: Found) -> None:
        report = self.report
        for name in ("messages", "warm_up", "behind"):
            setattr(report, name, found.counts.get(name, 0))
        report.failed = found.failed.num_rows
        report.rows = sum(found.files["rows"].to_pylist())
        report.files = found.files.num_rows
        report.bytes = sum(found.files["bytes"].to_pylist())
        if not self._plan.publish:
            report.not_published = {
                what.partition("/")[2]: n
                for what, n in found.counts.items()
                if what.startswith("publish/")
            }

    def _snapshot(self) -> Snapshot:
        """Return sink files and progress between which no settle with files has happened."""
        spec = self._plan.spec
        if self._plan.mode == "side_sink":
            # The progress of the group does not matter for another sink.
            everything = Settled(dict(self._log.ends), PLACE.empty_table())
            return Snapshot(schema.SINK_FILE.empty_table(), everything)
        for _ in range(_LOOKS):
            before = self._client.sink_files(spec.group)
            done = settled(self._client, spec.group, topic=spec.topic)
            after = self._client.sink_files(spec.group)
            if before.equals(after):
                return Snapshot(self._of_range(after), done)
        raise RequestError(
            f"The sink files of group {spec.group} changed during each of {_LOOKS} reads.",
            remedy="Repeat the replay when the consumer is less busy.",
        )

    def _of_range(self, files: pa.Table) -> pa.Table:
        wanted = set(self._plan.partitions)
        mine = [partition in wanted for partition in files["partition"].to_pylist()]
        return files.select(schema.SINK_FILE.names).filter(pa.array(mine, pa.bool_()))

    def _source(self, done: Settled) -> Source:
        stateful = self._plan.spec.state is not None
        folder = below(self._scratch, "tail")
        tail = self._log.tail(folder, wanted=self._range, whole=stateful)
        self._tell("reading", {"unsealed_queues": len(tail)})
        return Source(self._spark(), self._log, tail=tail, folder=folder, settled=done)

    def _count_open(self, source: Source, done: Settled) -> None:
        """Count the messages of the range that the group has not settled."""
        unread = any(done.cursors.get(q, 0) < end for q, end in self._log.ends.items())
        if not unread and not done.open.num_rows:
            return
        settled_only = self._wanted(source, boundary=None)
        everything = replace(settled_only, cursors=self._log.ends, open=None)
        parts = tasks.by_length(source.files(lambda segment: segment.may_hold(self._range)))
        counts = []
        for wanted in (everything, settled_only):
            task = partial(count_part, wanted=wanted, scratch=self._scratch)
            found = tasks.run_tasks(source.spark, parts, task=task)["count"]
            counts.append(sum(table["n"][0].as_py() for table in found))
        self.report.not_settled = counts[0] - counts[1]

    def _boundary(self, source: Source) -> BoundaryState | None:
        spec = self._plan.spec
        if spec.state is None:
            return None
        files = source.files(lambda segment: segment.may_hold(self._range))
        wanted = self._wanted(source, boundary=None)
        placing = partial(place_part, wanted=wanted, scratch=self._scratch)
        found = tasks.run_tasks(source.spark, tasks.by_length(files), task=placing)
        boundary = find_boundary_state(
            self._client,
            merge_firsts_and_lasts(found["places"]),
            group=spec.group,
            topic=spec.topic,
            state=spec.state,
        )
        kept = {q["queue_id"]: q["min_offset"] for q in self._log.described["offsets"]}
        self.report.states_unknown = boundary.unknown(kept)
        self._tell("states", {"message_groups": boundary.stretches.num_rows})
        return boundary

    def _walk(self, source: Source, boundary: BoundaryState | None) -> Found:
        files = source.files(
            lambda s: s.may_hold(self._range) or (boundary is not None and boundary.reads(s))
        )
        this = self._assignment(boundary, wanted=self._wanted(source, boundary=boundary))
        if not this.replay_rules.rules.ordered:
            parts = tasks.by_length(files)
        else:
            shares = tasks.share_out(
                files,
                one_queue_a_group=source.log.one_queue_a_group(files),
                parallelism=self._plan.parallelism,
            )
            parts = tasks.by_queue(files)
            if shares:
                self._tell("partitioning", {"files": shares})
                partitioning = partial(
                    partition_part, wanted=this.wanted, files=shares, scratch=self._scratch
                )
                found = tasks.run_tasks(source.spark, tasks.by_length(files), task=partitioning)
                parts = tasks.partitioned_parts(found["group_files"])
        return gathered(tasks.run_tasks(source.spark, parts, task=partial(walk_part, this=this)))

    def _wanted(self, source: Source, *, boundary: BoundaryState | None) -> Wanted:
        left = source.settled.open
        stretches = None if boundary is None else boundary.stretches
        return Wanted(
            self._range,
            self._log.root,
            source.settled.cursors,
            open=self._written(left if left.num_rows else None, "open"),
            stretches=self._written(stretches, "stretches"),
        )

    def _written(self, table: pa.Table | None, name: str) -> str | None:
        return (
            None
            if table is None
            else arrow_transport.write(table, below(self._scratch, f"{name}.arrow"))
        )

    def _assignment(self, boundary: BoundaryState | None, *, wanted: Wanted) -> Assignment:
        plan, spec = self._plan, self._plan.spec
        group = self._client.describe_group(spec.group)
        types = {t: str(self._client.describe_topic(t)["type"]) for t in spec.publishes}
        rules = Rules(
            handler=spec.handler,
            ordered=spec.order_by is not None,
            state_schema=spec.state,
            sink_schema=spec.sink_schema,
            partition_time=spec.partition_time if spec.sink_schema is not None else "",
            origin=spec.origin,
            publishes=types,
            publication=plan.publication_of(self._log.described["topic_id"]),
        )
        return Assignment(
            ReplayRules(rules, on_failure=group["on_failure"], tries=plan.tries),
            wanted,
            filter=spec.filter,
            filter_type=spec.filter_type,
            sink=None if spec.sink is None else self._target(),
            scratch=self._scratch,
            label=plan.label,
            before=self._written(None if boundary is None else boundary.before, "before"),
            after=self._written(None if boundary is None else boundary.after, "after"),
        )

    def _target(self) -> Address:
        """Return the folder of the range's rows."""
        plan = self._plan
        if plan.mode == "dry_run" or plan.spec.sink is None:
            return below(self._scratch, "rows")
        return plan.side_sink or plan.spec.sink


def replay(
    plan: ReplayPlan,
    client: Client,
    *,
    spark: "Callable[[], SparkSession]",
    on_progress: Progress = lambda _what, _facts: None,
) -> ReplayReport:
    """Replay a range.

    Args:
        plan: the plan.
        client: client of the broker.
        spark: returns the session; called when it is needed.
        on_progress: called with every step and its counts.

    Raises:
        RequestError: the plan does not fit the consumer, its sink or its rows; nothing was changed.
        SinkChangedError: another replay or compaction has replaced the files; nothing was changed.
    """
    one = Replay(plan, client, spark=spark, on_progress=on_progress)
    one.run()
    return one.report


def gathered(tables: tasks.Tables) -> Found:
    """Combine the results of the tasks of a walk."""
    counts: dict[str, int] = {}
    for table in tables.get("counts", []):
        for what, n in zip(table["what"].to_pylist(), table["n"].to_pylist(), strict=True):
            counts[what] = counts.get(what, 0) + n
    no_files = schema.SINK_FILE.empty_table()
    differ = [chunk for t in tables.get("differ", []) for chunk in t["message_group"].chunks]
    return Found(
        files=pa.concat_tables([no_files, *tables.get("files", [])]),
        behind=pa.concat_tables([no_files, *tables.get("behind", [])]),
        failed=pa.concat_tables([FAILED.empty_table(), *tables.get("failed", [])]),
        differ=pa.concat_arrays([pa.array([], pa.string()), *differ]),
        counts=counts,
        to_publish={
            kind.removeprefix(PUBLISHED): some
            for kind, some in tables.items()
            if kind.startswith(PUBLISHED)
        },
    )
