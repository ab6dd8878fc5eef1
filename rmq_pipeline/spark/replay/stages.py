"""The stages of a replay in Spark: the files that each task reads, and the tasks' results.

If no message group changes its queue, each task reads one queue, and no messages are moved.
Otherwise, or if queues are too few or too long, an earlier stage partitions the messages by message
group. Each task then reads the files of its partition.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from rmq_pipeline.spark.arrow_transport import ANSWER, ANSWER_DDL, Answer, answers, to_batch, unpack
from rmq_pipeline.spark.replay.topic_log import Stored

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Approximate number of messages per task.
ROWS_PER_TASK: Final = 500_000
#: Up to this number, messages are not divided among more tasks.
FEW_ROWS: Final = 20_000
_PART: Final = pa.schema([("part", pa.int32())])

#: Tables by their kind.
Tables = dict[str, list[pa.Table]]


@dataclass(frozen=True, slots=True)
class Part:
    """Input of a task: messages in archive files, or the files partitioned for it."""

    files: tuple[Stored, ...] = ()
    dealt: tuple[str, ...] = ()


def run(
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


def dealt_parts(dealt: list[pa.Table]) -> list[Part]:
    """Return one part per share, with its files in the order their messages were stored.

    Args:
        dealt: arranging.DEALT.
    """
    shares: dict[int, list[tuple[int, str]]] = {}
    for table in dealt:
        for row in table.to_pylist():
            shares.setdefault(row["share"], []).append((row["first_ms"], row["path"]))
    return [Part(dealt=tuple(path for _, path in sorted(some))) for some in shares.values()]
