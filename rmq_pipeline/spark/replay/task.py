"""A Spark task of a replay: sorted messages in, files and findings out."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.filter.expression import compile_filter
from rmq_pipeline.spark import sink
from rmq_pipeline.spark.group_walk import group_starts
from rmq_pipeline.spark.handler import MESSAGES
from rmq_pipeline.spark.job import rare_collections
from rmq_pipeline.spark.parcel import ANSWER, Answer, pack, to_batch, unpack
from rmq_pipeline.spark.replay import staged
from rmq_pipeline.spark.replay.settled import PLACE
from rmq_pipeline.spark.replay.walk import (
    BEHIND,
    FAILED,
    RANGE,
    ROLE,
    WARM_UP,
    Course,
    Replayed,
    walk_again,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: Messages walked at a time; a longer group is walked in several steps.
CHUNK_ROWS: Final = 20_000
#: Rows of the sink that are kept before they go into files.
FILE_ROWS: Final = 500_000

#: What the driver is told of a task's messages.
COUNTS: Final = pa.schema([("what", pa.string()), ("n", pa.int64())])


@dataclass(frozen=True, slots=True)
class Assignment:
    """What every task of a replay is told."""

    course: Course
    #: As the consumer receives: which messages it wants.
    filter: str
    filter_type: str
    #: Where files of the range go, None when rows are of no interest, and those of messages behind.
    sink: Path | None
    scratch: Path
    #: The name of its files, unique to the replay.
    label: str
    #: Arrow files of message_group and state: before the first message of each group, and after
    #: the last one.
    before: str | None = None
    after: str | None = None


def work(batches: Iterable[pa.RecordBatch], this: Assignment) -> Iterator[pa.RecordBatch]:
    """Walk one partition; batches of ANSWER."""
    task = _Task(this)
    with rare_collections():
        for messages, goes_on in chunks(batches, rows=CHUNK_ROWS):
            task.take(messages, goes_on=goes_on)
    yield to_batch(task.answers(), ANSWER)


def chunks(batches: Iterable[pa.RecordBatch], *, rows: int) -> Iterator[tuple[pa.Table, bool]]:
    """Sorted messages in tables of whole message groups; True: the last group goes on.

    Only a group of more than ``rows`` messages is ever cut.
    """
    pending: list[pa.Table] = []
    n = 0
    for batch in batches:
        pending.append(conformed(pa.Table.from_batches([batch])))
        n += batch.num_rows
        if n < rows:
            continue
        table = pa.concat_tables(pending).combine_chunks()
        last = int(group_starts(table["message_group"])[-1])
        if last:
            yield table.slice(0, last), False
            pending, n = [table.slice(last)], table.num_rows - last
        else:
            yield table, True
            pending, n = [], 0
    if n:
        yield pa.concat_tables(pending), False


#: What is walked: a message as a handler is given it, and its role.
WALKED: Final = pa.schema([*MESSAGES, (ROLE, pa.int32())])


def sent(messages: "DataFrame") -> "DataFrame":
    """What goes to the tasks of messages with their roles.

    A list or map that is null costs Spark's Arrow writer time with the square of a batch's rows: an
    empty one goes instead, and a column that says so.
    """
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    columns = []
    for field in WALKED:
        if field.name in _NESTED:
            column = F.col(field.name)
            columns.append(F.coalesce(column, _NESTED[field.name]()).alias(field.name))
            columns.append(column.isNull().alias(_null_of(field.name)))
        elif field.name != "delivery_attempt":
            columns.append(F.col(field.name))
    return messages.select(*columns)


def _no_keys() -> "Column":
    from pyspark.sql import functions as F  # noqa: N812

    return F.array().cast("array<string>")


def _no_properties() -> "Column":
    from pyspark.sql import functions as F  # noqa: N812

    return F.create_map().cast("map<string,string>")


_NESTED: Final = {"keys": _no_keys, "properties": _no_properties}


def _null_of(name: str) -> str:
    return f"{name}_is_null"


def conformed(table: pa.Table) -> pa.Table:
    """What ``sent`` sent, in the types that handlers are promised."""
    n = table.num_rows
    columns = []
    for wanted in WALKED:
        if wanted.name == "delivery_attempt":
            columns.append(pa.repeat(pa.scalar(1, pa.int32()), n))
            continue
        column = table[wanted.name]
        if column.type != wanted.type:
            column = column.cast(wanted.type)
        if wanted.name in _NESTED:
            is_null = table[_null_of(wanted.name)]
            column = pc.if_else(is_null, pa.scalar(None, wanted.type), column)
        columns.append(column)
    return pa.table(columns, schema=WALKED)


class _Task:
    """What a task has found so far."""

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
        #: queue_id -> [base, end) of the messages in the range.
        self._span: dict[int, tuple[int, int]] = {}
        #: The state of a group that goes on in the next chunk.
        self._carried: pa.Table | None = None
        self._mid_group = False
        self._stopped: set[str] = set()

    def take(self, messages: pa.Table, *, goes_on: bool) -> None:
        """Walk a chunk."""
        if self._filter is not None:
            messages = messages.filter(self._filter.matches(messages))
        if not messages.num_rows:
            return
        state = self._state_before(messages)
        self._widen(messages.filter(pc.equal(messages[ROLE], RANGE)))
        done = walk_again(messages, state, course=self._this.course, stopped=self._stopped)
        self._note(done)
        # Only the one group of a table that goes on is met again.
        self._stopped = done.stopped | self._stopped if goes_on else set()
        if self._before is None:
            return
        self._mid_group = goes_on
        self._carried = done.state if goes_on else None
        if not goes_on:
            self._compare(messages, done.state)

    def _state_before(self, messages: pa.Table) -> pa.Table | None:
        if self._before is None:
            return None
        groups = messages["message_group"].combine_chunks()
        found = self._before.filter(pc.is_in(self._before["message_group"], groups))
        if not self._mid_group:
            return found
        first = groups[0].as_py()
        found = found.filter(pc.not_equal(found["message_group"], first))
        if self._carried is None:
            return found
        carried = self._carried.filter(pc.equal(self._carried["message_group"], first))
        return pa.concat_tables([found, carried.select(found.column_names)])

    def _compare(self, messages: pa.Table, state: pa.Table | None) -> None:
        """Note the groups whose state is not what was recorded after the last message."""
        if self._after is None or self._before is None:
            return
        groups = pc.drop_null(pc.unique(messages["message_group"]))
        recorded = self._after.filter(pc.is_in(self._after["message_group"], groups))
        now = self._before.slice(0, 0) if state is None else state
        self._differ.append(differing(now.select(recorded.column_names), recorded))

    def _note(self, done: Replayed) -> None:
        self._failed += done.failed
        for role, name in ((WARM_UP, "warm_up"), (RANGE, "messages"), (BEHIND, "behind")):
            self._count(name, done.messages[role])
        for topic, n in done.published.items():
            self._count(f"publish/{topic}", n)
        for role, tables in done.rows.items():
            self._rows[role] += tables
            if sum(table.num_rows for table in self._rows[role]) >= FILE_ROWS:
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
        folder = this.sink if role == RANGE else this.scratch / "behind"
        if not tables or folder is None:
            return
        files = sink.stage(
            folder,
            pa.concat_tables(tables),
            partition_time=this.course.rules.partition_time,
            epoch=0,
            batch=0,
            messages=self._extremes() if role == RANGE else None,
            prefix=staged.prefix(this.label),
        )
        self._files[role].append(files)

    def _extremes(self) -> pa.Table:
        """The first and the last message of each queue, which say where all of them lie."""
        ends = [(q, offset) for q, (base, end) in self._span.items() for offset in (base, end - 1)]
        return pa.table(list(zip(*ends, strict=True)), schema=PLACE)

    def answers(self) -> list[Answer]:
        """Everything found, in parcels."""
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
        return [
            Answer(0, kind, "", *pack(table, self._this.scratch, label=kind))
            for kind, table in found.items()
        ]


def differing(one: pa.Table, other: pa.Table) -> pa.Array:
    """The message groups whose rows are not the same in both tables."""
    # As text: a NaN is no difference.
    left = {row["message_group"]: repr(row) for row in one.to_pylist()}
    right = {row["message_group"]: repr(row) for row in other.to_pylist()}
    names = [g for g in left.keys() | right.keys() if left.get(g) != right.get(g)]
    return pa.array(sorted(names), pa.string())
