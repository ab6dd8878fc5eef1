"""Spark tasks of a replay: the files that each one reads, its work, and its results.

If no message group changes its queue, each task reads one queue, and no messages are moved.
Otherwise, or if queues are too few or too long, an earlier stage partitions the messages by message
group. Each task then reads the files of its partition.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.filter.expression import compile_filter
from rmq_pipeline.handling import sink
from rmq_pipeline.handling.group_walk import rare_collections
from rmq_pipeline.spark.arrow_transport import (
    ANSWER,
    ANSWER_DDL,
    Answer,
    answers,
    pack,
    to_batch,
    unpack,
)
from rmq_pipeline.spark.replay import sinks
from rmq_pipeline.spark.replay.reading import (
    GROUP_FILES,
    Wanted,
    chunks,
    hours_behind,
    in_range,
    partition,
    sort_by_group,
    tables_of,
    walked,
)
from rmq_pipeline.spark.replay.topic_log import PLACE, Stored
from rmq_pipeline.spark.replay.walk import (
    BEHIND,
    FAILED,
    FIRSTS_AND_LASTS,
    RANGE,
    ROLE,
    WARM_UP,
    Replayed,
    ReplayRules,
    firsts_and_lasts,
    merge_firsts_and_lasts,
    walk_again,
)
from rmq_pipeline.storage.root import Address, below

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Approximate number of messages per task.
ROWS_PER_TASK: Final = 500_000
#: Up to this number, messages are not divided among more tasks.
FEW_ROWS: Final = 20_000
_PART: Final = pa.schema([("part", pa.int32())])

#: Tables by their kind.
Tables = dict[str, list[pa.Table]]
#: Limits of buffered sink rows, above which they are written to files.
FILE_ROWS: Final = 500_000
FILE_BYTES: Final = 256 << 20

_PLACE_COLUMNS: Final = ["message_group", "stored_at_ms", "queue_offset"]

#: Prefix of the kind of results with messages to publish; the topic follows.
PUBLISHED: Final = "published/"
#: Columns of a task's message counts.
COUNTS: Final = pa.schema([("what", pa.string()), ("n", pa.int64())])


@dataclass(frozen=True, slots=True)
class Part:
    """Input of a task: messages in archive files, or the files partitioned for it."""

    files: tuple[Stored, ...] = ()
    group_files: tuple[str, ...] = ()


def run_tasks(
    spark: "SparkSession", parts: list[Part], *, task: Callable[[Part], list[Answer]]
) -> Tables:
    """Run a task for each part; return the results by kind."""
    if not parts:
        return {}

    def tasks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column("part").to_pylist():
                yield to_batch(task(parts[number]), ANSWER)

    # Spark makes one task per record batch.
    rows = pa.Table.from_batches(
        [pa.RecordBatch.from_pylist([{"part": i}], schema=_PART) for i in range(len(parts))]
    )
    frame = spark.createDataFrame(rows).mapInArrow(tasks, ANSWER_DDL)
    found: Tables = {}
    for answer in answers(frame.toArrow().cast(ANSWER)):
        found.setdefault(answer.kind, []).append(unpack(answer.payload, answer.path))
    return found


def by_queue(files: list[Stored]) -> list[Part]:
    """Return one part per queue, longest first, with its files in offset order."""
    queues: dict[int, list[Stored]] = {}
    for each in sorted(files, key=lambda each: each.base):
        queues.setdefault(each.queue_id, []).append(each)
    return sorted((Part(tuple(some)) for some in queues.values()), key=rows_of, reverse=True)


def by_length(files: list[Stored]) -> list[Part]:
    """Return parts of about ROWS_PER_TASK, each of one queue."""
    parts: list[Part] = []
    for queue in by_queue(files):
        some: list[Stored] = []
        for each in queue.files:
            some.append(each)
            if sum(file.rows for file in some) >= ROWS_PER_TASK:
                parts.append(Part(tuple(some)))
                some = []
        if some:
            parts.append(Part(tuple(some)))
    return parts


def rows_of(part: Part) -> int:
    """Return the number of messages in its files."""
    return sum(each.rows for each in part.files)


def share_out(files: list[Stored], *, one_queue_a_group: bool, parallelism: int) -> int:
    """Return the number of files for partitioning messages; 0 if tasks can read queues directly.

    Args:
        files: files to read.
        one_queue_a_group: True if no message group is in two queues.
        parallelism: minimum number of tasks if there is enough work.
    """
    parts = by_queue(files)
    rows = sum(map(rows_of, parts))
    wanted = max(min(parallelism, -(-rows // FEW_ROWS)), -(-rows // ROWS_PER_TASK), 1)
    largest = max(map(rows_of, parts), default=0)
    fits = largest <= max(ROWS_PER_TASK, 2 * rows // wanted)
    return 0 if one_queue_a_group and fits and len(parts) >= min(wanted, parallelism) else wanted


def partitioned_parts(files: list[pa.Table]) -> list[Part]:
    """Return one part per share, with its files in the order their messages were stored.

    Args:
        files: reading.GROUP_FILES.
    """
    shares: dict[int, list[tuple[int, str]]] = {}
    for table in files:
        for row in table.to_pylist():
            shares.setdefault(row["share"], []).append((row["first_ms"], row["path"]))
    return [Part(group_files=tuple(path for _, path in sorted(some))) for some in shares.values()]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Parameters of every task of a replay."""

    replay_rules: ReplayRules
    wanted: Wanted
    #: Filter of the consumer's subscription.
    filter: str
    filter_type: str
    #: Folder of the range's files (None if rows are not needed), and folder for files of messages
    #: behind the range.
    sink: Address | None
    scratch: Address
    #: Label in the file names, unique to the replay.
    label: str
    #: Arrow files of message_group and state: before the first message of each group, and after the
    #: last one.
    before: str | None = None
    after: str | None = None


def walk_part(part: Part, this: Assignment) -> list[Answer]:
    """Walk the messages of a part; by message group if the consumer keeps order."""
    found = _messages_of(part, this.wanted)
    task = _Task(this)
    local = this.scratch if isinstance(this.scratch, Path) else None
    with TemporaryDirectory(dir=local) as folder, rare_collections():
        if this.replay_rules.rules.ordered:
            found = sort_by_group(found, folder=Path(folder))
        for messages, goes_on in chunks(found):
            task.take(messages, goes_on=goes_on)
    return task.answers()


def partition_part(part: Part, wanted: Wanted, *, files: int, scratch: Address) -> list[Answer]:
    """Partition the messages of a part by message group into files."""
    by_share = partition(
        walked(list(part.files), wanted), folder=below(scratch, "group_files"), files=files
    )
    rows = [
        {"share": share, "path": each.path, "first_ms": each.first_ms}
        for share, each in by_share.items()
    ]
    table = pa.Table.from_pylist(rows, schema=GROUP_FILES)
    return [Answer(0, "group_files", "", *pack(table, scratch, label="group_files"))]


def count_part(part: Part, wanted: Wanted, *, scratch: Address) -> list[Answer]:
    """Count the messages of the range in a part."""
    found = in_range(list(part.files), wanted, columns=["queue_offset"])
    n = pa.table({"n": [sum(table.num_rows for table in found)]})
    return [Answer(0, "count", "", *pack(n, scratch, label="count"))]


def place_part(part: Part, wanted: Wanted, *, scratch: Address) -> list[Answer]:
    """Find the first and last message in the range for each message group of a part."""
    tables = [FIRSTS_AND_LASTS.empty_table()]
    for each in part.files:
        for table in in_range([each], wanted, columns=_PLACE_COLUMNS):
            queue_id = pa.repeat(pa.scalar(each.queue_id, pa.int32()), table.num_rows)
            tables.append(firsts_and_lasts(table.append_column("queue_id", queue_id)))
    return [Answer(0, "places", "", *pack(merge_firsts_and_lasts(tables), scratch, label="places"))]


def hours_part(part: Part, wanted: Wanted, *, ends: str, scratch: Address) -> list[Answer]:
    """Find the hours behind the range with messages of the groups in ``ends``, an Arrow file."""
    found = hours_behind(list(part.files), wanted, ends=unpack(None, ends))
    return [Answer(0, "hours", "", *pack(pa.table({"hour": found}), scratch, label="hours"))]


def _messages_of(part: Part, wanted: Wanted) -> Iterator[pa.Table]:
    if part.group_files:
        return chain.from_iterable(map(tables_of, part.group_files))
    return walked(list(part.files), wanted)


class _Task:
    """Results of a task so far."""

    def __init__(self, this: Assignment) -> None:
        self._this = this
        self._filter = None if this.filter == "*" else compile_filter(this.filter, this.filter_type)
        self._before = None if this.before is None else unpack(None, this.before)
        self._after = None if this.after is None else unpack(None, this.after)
        self._rows: dict[int, list[pa.Table]] = {RANGE: [], BEHIND: []}
        self._files: dict[int, list[pa.Table]] = {RANGE: [], BEHIND: []}
        self._failed: list[pa.Table] = []
        self._counts: dict[str, int] = {}
        self._differ: list[pa.Array] = []
        #: Published messages, to be sent by the driver.
        self._published: list[Answer] = []
        #: queue_id -> [base, end) of the messages in the range.
        self._span: dict[int, tuple[int, int]] = {}
        #: A group that may continue in the next chunk, and its state.
        self._open: str | None = None
        self._carried: pa.Table | None = None
        self._stopped: set[str] = set()

    def take(self, messages: pa.Table, *, goes_on: bool) -> None:
        """Walk a chunk."""
        first = messages["message_group"][0].as_py()
        # Before the filter, which may drop all messages with which a group continues.
        if first != self._open:
            self._close()
        if self._filter is not None:
            messages = messages.filter(self._filter.matches(messages))
        if not messages.num_rows:
            return
        state = self._state_before(messages)
        self._widen(messages.filter(pc.equal(messages[ROLE], RANGE)))
        done = walk_again(
            messages, state, replay_rules=self._this.replay_rules, stopped=self._stopped
        )
        self._note(done)
        # Only the single group of a table that continues can occur again.
        self._stopped = done.stopped | self._stopped if goes_on else set()
        if self._before is None:
            return
        if goes_on:
            self._open, self._carried = first, done.state
            return
        # Compare it with the others, unless the filter has dropped its last messages.
        if messages["message_group"][0].as_py() != self._open:
            self._close()
        self._open = self._carried = None
        self._compare(pc.drop_null(pc.unique(messages["message_group"])), done.state)

    def _state_before(self, messages: pa.Table) -> pa.Table | None:
        if self._before is None:
            return None
        groups = messages["message_group"].combine_chunks()
        found = self._before.filter(pc.is_in(self._before["message_group"], groups))
        if self._open is None or self._carried is None or groups[0].as_py() != self._open:
            return found
        found = found.filter(pc.not_equal(found["message_group"], self._open))
        return pa.concat_tables([found, self._carried.select(found.column_names)])

    def _close(self) -> None:
        """Compare the state of the carried group, which has ended."""
        if self._open is not None:
            self._compare(pa.array([self._open]), self._carried)
        self._open = self._carried = None

    def _compare(self, groups: pa.Array, state: pa.Table | None) -> None:
        """Record the groups whose state differs from the state recorded after the last message."""
        if self._after is None or self._before is None:
            return
        recorded = self._after.filter(pc.is_in(self._after["message_group"], groups))
        now = self._before.slice(0, 0) if state is None else state
        self._differ.append(differing(now.select(recorded.column_names), recorded))

    def _note(self, done: Replayed) -> None:
        self._failed += done.failed
        for role, name in ((WARM_UP, "warm_up"), (RANGE, "messages"), (BEHIND, "behind")):
            self._count(name, done.messages[role])
        for topic, n in done.published.items():
            self._count(f"publish/{topic}", n)
        for topic, table in done.to_publish:
            packed = pack(table, self._this.scratch, label="published")
            self._published.append(Answer(0, f"{PUBLISHED}{topic}", "", *packed))
        for role, tables in done.rows.items():
            self._rows[role] += tables
            n = sum(table.num_rows for table in self._rows[role])
            if n >= FILE_ROWS or sum(t.nbytes for t in self._rows[role]) >= FILE_BYTES:
                self._flush(role)

    def _widen(self, messages: pa.Table) -> None:
        extremes = [("queue_offset", "min"), ("queue_offset", "max")]
        found = messages.group_by("queue_id").aggregate(extremes)
        names = ("queue_id", "queue_offset_min", "queue_offset_max")
        for queue_id, low, high in zip(*(found[n].to_pylist() for n in names), strict=True):
            base, end = self._span.get(queue_id, (low, high + 1))
            self._span[queue_id] = min(base, low), max(end, high + 1)

    def _count(self, what: str, n: int) -> None:
        self._counts[what] = self._counts.get(what, 0) + n

    def _flush(self, role: int) -> None:
        tables, self._rows[role] = self._rows[role], []
        this = self._this
        folder = this.sink if role == RANGE else below(this.scratch, "behind")
        if not tables or folder is None:
            return
        files = sink.stage(
            folder,
            pa.concat_tables(tables),
            partition_time=this.replay_rules.rules.partition_time,
            epoch=0,
            batch=0,
            messages=self._extremes() if role == RANGE else None,
            prefix=sinks.prefix(this.label),
        )
        self._files[role].append(files)

    def _extremes(self) -> pa.Table:
        """Return the first and last message of each queue, which give the range of offsets."""
        ends = [(q, offset) for q, (base, end) in self._span.items() for offset in (base, end - 1)]
        return pa.table(list(zip(*ends, strict=True)), schema=PLACE)

    def answers(self) -> list[Answer]:
        """Return all results as Arrow transport."""
        self._close()
        for role in (RANGE, BEHIND):
            self._flush(role)
        found = {
            "counts": pa.table([list(self._counts), list(self._counts.values())], schema=COUNTS),
            "failed": pa.concat_tables([FAILED.empty_table(), *self._failed]),
            "differ": pa.table({"message_group": pa.chunked_array(self._differ, pa.string())}),
        }
        for role, kind in ((RANGE, "files"), (BEHIND, "behind")):
            if self._files[role]:
                found[kind] = pa.concat_tables(self._files[role])
        told = [
            Answer(0, kind, "", *pack(table, self._this.scratch, label=kind))
            for kind, table in found.items()
        ]
        return [*told, *self._published]


def differing(one: pa.Table, other: pa.Table) -> pa.Array:
    """Return the message groups whose rows differ between two tables."""
    # Compared as text, so that NaN equals NaN.
    left = {row["message_group"]: repr(row) for row in one.to_pylist()}
    right = {row["message_group"]: repr(row) for row in other.to_pylist()}
    names = [g for g in left.keys() | right.keys() if left.get(g) != right.get(g)]
    return pa.array(sorted(names), pa.string())
