"""Replay: a range of a topic through its consumer again, beside the living group.

The messages come from the segments, read by Spark; the group's progress, leases and state are not
touched, and nothing that the handler publishes is sent.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.errors import RequestError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.spark.group_walk import Rules
from rmq_pipeline.spark.parcel import ANSWER, ANSWER_DDL, answers, unpack
from rmq_pipeline.spark.replay import surroundings
from rmq_pipeline.spark.replay.effects import Effects, Found, Snapshot, done_before
from rmq_pipeline.spark.replay.plan import ReplayPlan, ReplayReport
from rmq_pipeline.spark.replay.settled import PLACE, Settled, settled
from rmq_pipeline.spark.replay.source import Source
from rmq_pipeline.spark.replay.task import Assignment, sent, work
from rmq_pipeline.spark.replay.topic_log import Range, TopicLog
from rmq_pipeline.spark.replay.walk import FAILED, Course

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Progress = Callable[[str, dict[str, Any]], None]

#: Messages of one task, about: its rows are sorted in memory or spilled.
ROWS_PER_TASK: Final = 500_000
#: Times that sink and progress are looked at until they are of one moment.
_LOOKS: Final = 100


class Replay:
    """One replay; ``run`` once."""

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
        self._scratch = Path()
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
        if plan.mode != "side_sink":
            plan.check_partitions(self._range.partition_time)

    def run(self) -> None:
        """Walk the range, and do with its rows what the plan says."""
        started = time.monotonic()
        plan = self._plan
        if plan.mode == "replace" and done_before(plan, self._client, report=self.report):
            return
        plan.folder.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="replay-", dir=plan.folder))
        try:
            self._replay()
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self.report.seconds = time.monotonic() - started

    def _replay(self) -> None:
        snapshot = self._snapshot()
        # Listed after the snapshot: what is settled is stored, and must not be missed.
        self._log = TopicLog(self._client, self._plan.spec.topic)
        started = time.monotonic()
        source = self._source(snapshot.settled)
        messages = source.of(lambda segment: segment.may_hold(self._range))
        found, course = Found.nothing(), None
        if messages is not None:
            self._count_open(source, snapshot.settled)
            course = self._course(messages)
            found = self._walk(source, course)
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
        effects.finish(messages, snapshot=snapshot, found=found)
        if course is not None:
            effects.look_behind(source, stretches=course.stretches, found=found)
        self.report.spark_s = time.monotonic() - started

    def _count(self, found: Found) -> None:
        report = self.report
        for name in ("messages", "warm_up", "behind"):
            setattr(report, name, found.counts.get(name, 0))
        report.failed = found.failed.num_rows
        report.rows = sum(found.files["rows"].to_pylist())
        report.files = found.files.num_rows
        report.bytes = sum(found.files["bytes"].to_pylist())
        report.not_published = {
            what.partition("/")[2]: n
            for what, n in found.counts.items()
            if what.startswith("publish/")
        }

    def _snapshot(self) -> Snapshot:
        """What counts, and what is settled: no settle with files lies between the two looks."""
        spec = self._plan.spec
        if self._plan.mode == "side_sink":
            # Whatever the group has done: another sink is filled.
            everything = Settled(dict(self._log.ends), PLACE.empty_table())
            return Snapshot(schema.SINK_FILE.empty_table(), everything)
        for _ in range(_LOOKS):
            before = self._client.sink_files(spec.group)
            done = settled(self._client, spec.group, topic=spec.topic)
            after = self._client.sink_files(spec.group)
            if before.equals(after):
                return Snapshot(self._of_range(after), done)
        raise RequestError(f"Group {spec.group} settles too fast to be looked at.")

    def _of_range(self, files: pa.Table) -> pa.Table:
        wanted = set(self._plan.partitions)
        mine = [partition in wanted for partition in files["partition"].to_pylist()]
        return files.select(schema.SINK_FILE.names).filter(pa.array(mine, pa.bool_()))

    def _source(self, done: Settled) -> Source:
        stateful = self._plan.spec.state is not None
        folder = self._scratch / "tail"
        tail = self._log.tail(folder, wanted=self._range, whole=stateful)
        self._tell("reading", {"unsealed_queues": len(tail)})
        return Source(self._spark(), self._log, tail=tail, folder=folder, settled=done)

    def _count_open(self, source: Source, done: Settled) -> None:
        """Count the messages of the range that the group is not done with."""
        unread = any(done.cursors.get(q, 0) < end for q, end in self._log.ends.items())
        if not unread and not done.open.num_rows:
            return
        counts = []
        for settled_only in (False, True):
            some = source.of(
                lambda segment: segment.may_hold(self._range), settled_only=settled_only
            )
            counts.append(0 if some is None else some.filter(self._range.holds()).count())
        self.report.not_settled = counts[0] - counts[1]

    def _course(self, messages: "DataFrame") -> "surroundings.Surroundings | None":
        spec = self._plan.spec
        if spec.state is None:
            return None
        course = surroundings.find_course(
            self._client,
            messages.filter(self._range.holds()),
            group=spec.group,
            topic=spec.topic,
            state=spec.state,
        )
        kept = {q["queue_id"]: q["min_offset"] for q in self._log.described["offsets"]}
        self.report.states_unknown = course.unknown(kept)
        self._tell("states", {"message_groups": course.stretches.num_rows})
        return course

    def _walk(self, source: Source, course: "surroundings.Surroundings | None") -> Found:
        from pyspark.sql import functions as F  # noqa: N812 - its usual name

        messages = source.of(
            lambda s: s.may_hold(self._range) or (course is not None and course.reads(s))
        )
        assert messages is not None
        chosen = sent(surroundings.with_roles(messages, wanted=self._range, course=course))
        if self._plan.spec.order_by is not None:
            alone = F.concat_ws("-", F.lit(" "), "queue_id", "queue_offset")
            tasks = max(self._plan.parallelism, -(-self._size() // ROWS_PER_TASK))
            chosen = chosen.repartition(tasks, F.coalesce("message_group", alone))
            # A number first: most comparisons end with it, and never touch the texts.
            chosen = chosen.sortWithinPartitions(
                F.xxhash64("message_group"),
                "message_group",
                "stored_at_ms",
                "queue_id",
                "queue_offset",
            )
        this = self._assignment(course)
        return gathered(
            chosen.mapInArrow(lambda batches: work(batches, this), ANSWER_DDL).toArrow()
        )

    def _size(self) -> int:
        """Messages of the range, at most."""
        n: int = sum(s.end - s.base for s in self._log.segments if s.may_hold(self._range))
        begins = self._log.tail_begins()
        n += sum(max(0, end - begins.get(q, 0)) for q, end in self._log.ends.items())
        return n

    def _assignment(self, course: "surroundings.Surroundings | None") -> Assignment:
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
        )
        before = after = None
        if course is not None:
            before = surroundings.write(course.before, self._scratch / "before.arrow")
            after = surroundings.write(course.after, self._scratch / "after.arrow")
        return Assignment(
            Course(rules, on_failure=group["on_failure"], tries=plan.tries),
            filter=spec.filter,
            filter_type=spec.filter_type,
            sink=None if spec.sink is None else self._target(),
            scratch=self._scratch,
            label=plan.label,
            before=before,
            after=after,
        )

    def _target(self) -> Path:
        """Where the rows of the range go."""
        plan = self._plan
        if plan.mode == "dry_run" or plan.spec.sink is None:
            return self._scratch / "rows"
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
        plan: what and how.
        client: of the broker.
        spark: gives the session; called when it is needed.
        on_progress: told of every step, with numbers.

    Raises:
        RequestError: the plan does not fit the consumer, its sink or its rows; nothing was changed.
        SinkChangedError: others have replaced the files meanwhile; nothing was changed.
    """
    one = Replay(plan, client, spark=spark, on_progress=on_progress)
    one.run()
    return one.report


def gathered(answered: pa.Table) -> Found:
    """What the tasks of a walk found, together."""
    tables: dict[str, list[pa.Table]] = {}
    for answer in answers(answered.cast(ANSWER)):
        tables.setdefault(answer.kind, []).append(unpack(answer.payload, answer.path))
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
    )
