"""Results of a poll, as a table or message by message."""

from collections.abc import Iterator
from itertools import chain
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import schema
from rmq_pipeline.consumer.message_queue import MessageQueue
from rmq_pipeline.consumer.process_queue import ProcessQueue
from rmq_pipeline.consumer.received_message import ReceivedMessage, messages_of

#: Schema of the table that ``poll`` returns.
POLLED: Final = pa.schema([("topic", pa.string()), *schema.READ])


def by_queue(messages: pa.Table) -> dict[int, pa.Table]:
    """Split rows by queue; the rows of each queue must be contiguous."""
    counts = pc.value_counts(messages["queue_id"].combine_chunks())
    parts: dict[int, pa.Table] = {}
    start = 0
    for each in counts.to_pylist():
        parts[each["values"]] = messages.slice(start, each["counts"])
        start += each["counts"]
    return parts


def polled(topic: str, rows: pa.Table) -> pa.Table:
    """Add the topic to rows of schema.READ; the result has the schema POLLED."""
    topics = pa.repeat(pa.scalar(topic, pa.string()), rows.num_rows)
    return rows.add_column(0, POLLED.field("topic"), topics)


def one_by_one(table: pa.Table, *, broker_name: str) -> Iterator[ReceivedMessage]:
    """Yield the rows of a POLLED table as messages."""
    for topic in table["topic"].unique().to_pylist():
        rows = table.filter(pc.equal(table["topic"], topic)).drop_columns("topic")
        queues = {
            queue_id: ProcessQueue(MessageQueue(topic, broker_name, queue_id), now_ms=0)
            for queue_id in rows["queue_id"].unique().to_pylist()
        }
        yield from chain.from_iterable(messages_of(rows, topic, queues=queues).values())
