"""Writes to topics: each task sends its rows in order, hence a message group's rows in order."""

import itertools
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from typing_extensions import override

from rmq_pipeline import schema
from rmq_pipeline.errors import BrokerUnavailableError, RequestError
from rmq_pipeline.flight.client import Client
from rmq_pipeline.spark.source.options import WriteOptions

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

log = logging.getLogger(__name__)

#: Messages of one send, and the approximate size of their bodies.
_ROWS: Final = 20_000
_BYTES: Final = 16 << 20
#: Attempts of a send without an answer, if the topic drops repeated message ids.
_TRIES: Final = 5
#: Spark's local properties with the ids of the query and the micro-batch.
_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"


@dataclass(frozen=True)
class Sent(WriterCommitMessage):
    """Counts of a task's messages."""

    messages: int
    #: Messages that an earlier attempt had stored.
    duplicates: int


class BatchWriter(DataSourceArrowWriter):
    """Batch writer; messages that were sent stay even if the job fails later."""

    def __init__(self, options: WriteOptions, columns: Sequence[str]) -> None:
        check_columns(options, columns)
        self._options = options
        # Constant over all attempts of a task.
        self._job = uuid.uuid4().hex

    @override
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of a task."""
        return send_all(self._options, iterator, job=self._job)

    @override
    def commit(self, messages: "list[WriterCommitMessage | None]") -> None:
        """Log how many messages earlier attempts had stored."""
        _log_duplicates(messages)

    @override
    def abort(self, messages: "list[WriterCommitMessage | None]") -> None:
        """Log how many messages stay; the writer takes back no message."""
        _log_aborted(messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """Streaming writer; a repeated micro-batch sends the same message ids."""

    def __init__(self, options: WriteOptions, columns: Sequence[str]) -> None:
        check_columns(options, columns)
        self._options = options

    @override
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of a task."""
        task = TaskContext.get()
        parts = [task.getLocalProperty(name) for name in (_QUERY, _BATCH)] if task else [None]
        if None in parts:
            raise RuntimeError("Spark set no id of the query or micro-batch.")
        return send_all(self._options, iterator, job="-".join(map(str, parts)))

    @override
    def commit(self, messages: "list[WriterCommitMessage | None]", batchId: int) -> None:
        """Log how many messages earlier attempts had stored."""
        _log_duplicates(messages)

    @override
    def abort(self, messages: "list[WriterCommitMessage | None]", batchId: int) -> None:
        """Log how many messages stay; Spark repeats the batch."""
        _log_aborted(messages)


def by_message_group(
    frame: "DataFrame", *order: "str | Column", tasks: int | None = None
) -> "DataFrame":
    """Return the rows ready to be written: each message group in one task, in order.

    Replaces null ``keys`` and ``properties`` by empty ones, which mean the same to a topic: a run
    of null lists or maps takes Spark quadratic time on the way to Python.

    Args:
        frame: has the column message_group.
        order: columns to sort by.
        tasks: number of tasks; None: spark.sql.shuffle.partitions.
    """
    from pyspark.sql import functions as F  # noqa: N812 - its usual name

    # Spread messages without a group over all tasks.
    alone = F.concat_ws("-", F.lit(" "), *(F.col(c) if isinstance(c, str) else c for c in order))
    where = F.coalesce("message_group", alone)
    empty = {"keys": F.array, "properties": F.create_map}
    for name in empty.keys() & set(frame.columns):
        none = empty[name]().cast(frame.schema[name].dataType)
        frame = frame.withColumn(name, F.coalesce(F.col(name), none))
    spread = frame.repartition(where) if tasks is None else frame.repartition(tasks, where)
    return spread.sortWithinPartitions(*order)


def check_columns(options: WriteOptions, columns: Sequence[str]) -> None:
    """Refuse columns that do not make messages.

    Raises:
        RequestError: a column is missing or unknown.
    """
    known = [*schema.SEND.names, "topic"]
    odd = [name for name in columns if name not in known]
    if odd:
        raise RequestError(
            f"Column {odd[0]} is not a column of a message; known are {', '.join(known)}."
        )
    if "body" not in columns:
        raise RequestError("The rows have no column body.")
    if (options.topic is None) == ("topic" not in columns):
        raise RequestError("Name the topic once: in the option topic, or in a column topic.")


def send_all(
    options: WriteOptions, batches: Iterator[pa.RecordBatch], *, job: str
) -> WriterCommitMessage:
    """Send the rows of a task; their message ids are made of job, task and row number.

    Raises:
        RocketMQError: the broker refused a message; those before it are stored.
    """
    task = TaskContext.get()
    part = task.partitionId() if task is not None else 0
    sent = duplicates = done = 0
    with options.address.connect() as client:
        repeatable: dict[str, bool] = {}
        for batch in batches:
            table = with_ids(pa.Table.from_batches([batch]), f"{job}-{part}", first=done)
            done += table.num_rows
            for topic, rows in _by_topic(table, options.topic):
                if topic not in repeatable:
                    described = client.describe_topic(topic)
                    repeatable[topic] = described["deduplicate"] == "message_id"
                for piece in pieces(rows):
                    answer = send(client, topic, messages=piece, repeatable=repeatable[topic])
                    sent += answer.num_rows
                    duplicates += pc.sum(answer["duplicate"]).as_py() or 0
    return Sent(sent - duplicates, duplicates)


def with_ids(table: pa.Table, label: str, *, first: int) -> pa.Table:
    """Return the table as schema.SEND, with an id for every message that has none."""
    numbers = pa.array(np.arange(first, first + table.num_rows)).cast(pa.string())
    ids = pc.binary_join_element_wise(pa.scalar(label), numbers, "-")
    if "message_id" in table.column_names:
        ids = pc.coalesce(table["message_id"].cast(pa.string()), ids)
        table = table.drop_columns(["message_id"])
    table = table.append_column("message_id", ids)
    known = {field.name: field.type for field in [*schema.SEND, pa.field("topic", pa.string())]}
    wanted = pa.schema([pa.field(name, known[name]) for name in table.column_names])
    table = table.cast(wanted)
    if "keys" in wanted.names:
        # As stored: null for an empty list.
        some = pc.greater(pc.list_value_length(table["keys"]), 0)
        keys = pc.if_else(some, table["keys"], pa.scalar(None, schema.KEYS))
        table = table.set_column(wanted.get_field_index("keys"), wanted.field("keys"), keys)
    return table


def _by_topic(table: pa.Table, topic: str | None) -> Iterator[tuple[str, pa.Table]]:
    if topic is not None:
        yield topic, table
        return
    names = table["topic"]
    if names.null_count:
        raise RequestError("A row has a null topic.")
    for name in pc.unique(names).to_pylist():
        yield name, table.filter(pc.equal(names, name)).drop_columns(["topic"])


def pieces(table: pa.Table) -> Iterator[pa.Table]:
    """Yield parts of at most _ROWS rows and about _BYTES of bodies."""
    bodies = pc.fill_null(pc.binary_length(table["body"]), 0).to_numpy()
    shares = np.cumsum(bodies / _BYTES + 1 / _ROWS)
    number = np.floor(shares)
    cuts = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), table.num_rows]
    for start, stop in itertools.pairwise(cuts):
        if stop > start:
            yield table.slice(start, stop - start)


def send(client: Client, topic: str, *, messages: pa.Table, repeatable: bool) -> pa.Table:
    """Store messages; returns schema.SENT.

    Args:
        client: of the broker.
        topic: its name.
        messages: schema.SEND.
        repeatable: the topic drops repeated message ids, so a send without an answer is repeated.
    """
    for tried in itertools.count(1):
        try:
            return client.send(topic, messages)
        except BrokerUnavailableError:
            # The broker may have stored them. A topic that drops repeated ids makes repeating safe.
            if not repeatable or tried == _TRIES:
                raise
            client.ping()
    raise AssertionError


def _log_duplicates(messages: "Sequence[WriterCommitMessage | None]") -> None:
    again = sum(each.duplicates for each in messages if isinstance(each, Sent))
    if again:
        log.info("%d messages were stored by earlier attempts.", again)


def _log_aborted(messages: "Sequence[WriterCommitMessage | None]") -> None:
    stored = sum(each.messages for each in messages if isinstance(each, Sent))
    log.warning("A write failed; at least %d messages of it are stored.", stored)
