"""Received messages: views of the rows of a pulled table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from rmq_pipeline.consumer.process_queue import ProcessQueue

#: Bodies longer than this on average are converted one by one, to avoid a second copy of all.
_LONG_BODY_BYTES: Final = 64 * 1024


class Rows:
    """Messages of one pull; each column is converted to Python at its first use."""

    __slots__ = ("_columns", "_table", "topic")

    def __init__(self, topic: str, table: pa.Table) -> None:
        self.topic = topic
        self._table = table
        self._columns: dict[str, list[Any]] = {}

    def value(self, name: str, row: int) -> Any:
        """Return one value; None if the table lacks the column."""
        column = self._columns.get(name)
        return (self._read(name) if column is None else column)[row]

    def _read(self, name: str) -> Sequence[Any]:
        if name not in self._table.column_names:
            column: list[Any] = [None] * self._table.num_rows
        else:
            found = self._table.column(name)
            if name == "body" and found.nbytes > _LONG_BODY_BYTES * max(1, len(found)):
                return _OneByOne(found)
            column = found.to_pylist()
        self._columns[name] = column
        return column


class _OneByOne(Sequence[Any]):
    """Values of a column, each converted at its use."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, row: Any) -> Any:
        return self._column[row].as_py()


class ReceivedMessage:
    """Message of a pull; its fields are read at their first use."""

    __slots__ = ("_row", "_rows", "failures", "queue", "queue_offset", "receipt_handle", "size")

    def __init__(
        self,
        rows: Rows,
        row: int,
        *,
        queue: "ProcessQueue",
        queue_offset: int,
        receipt_handle: str,
        size: int,
    ) -> None:
        self._rows, self._row = rows, row
        #: ProcessQueue that holds the message.
        self.queue = queue
        self.queue_offset = queue_offset
        #: Receipt of the delivery; empty if the message was read by offset.
        self.receipt_handle = receipt_handle
        #: Bytes of the body.
        self.size = size
        #: Failed calls of the listener with this message since the pull.
        self.failures = 0

    def __repr__(self) -> str:
        return f"<message {self.topic}/{self.queue_id}/{self.queue_offset}>"

    @property
    def topic(self) -> str:
        """Topic of the message."""
        return self._rows.topic

    @property
    def queue_id(self) -> int:
        """Queue of the message in the topic."""
        return self.queue.queue.queue_id

    @property
    def body(self) -> bytes:
        """Content of the message."""
        body: bytes = self._rows.value("body", self._row)
        return body

    @property
    def message_id(self) -> str:
        """Message id, set by the producer or by the broker."""
        message_id: str = self._rows.value("message_id", self._row)
        return message_id

    @property
    def tag(self) -> str | None:
        """Tag for filters."""
        tag: str | None = self._rows.value("tag", self._row)
        return tag

    @property
    def keys(self) -> list[str]:
        """Keys for searches."""
        return list(self._rows.value("keys", self._row) or ())

    @property
    def message_group(self) -> str | None:
        """Message group, whose messages are delivered in order."""
        message_group: str | None = self._rows.value("message_group", self._row)
        return message_group

    @property
    def properties(self) -> dict[str, str]:
        """Properties set by the producer."""
        return dict(self._rows.value("properties", self._row) or ())

    @property
    def born_at_ms(self) -> int:
        """Time of creation at the producer, in ms since 1970."""
        return int(self._rows.value("born_at_ms", self._row))

    @property
    def stored_at_ms(self) -> int:
        """Time of storage at the broker, in ms since 1970."""
        return int(self._rows.value("stored_at_ms", self._row))

    @property
    def delivery_attempt(self) -> int:
        """Known number of this delivery to a listener; the first is 1."""
        return int(self._rows.value("delivery_attempt", self._row) or 1) + self.failures

    @property
    def reconsume_times(self) -> int:
        """Earlier failures (RocketMQ's name); one less than ``delivery_attempt``."""
        return self.delivery_attempt - 1


def messages_of(
    table: pa.Table, topic: str, *, queues: dict[int, "ProcessQueue"]
) -> dict[int, list[ReceivedMessage]]:
    """Return the rows of a pull as messages, by queue_id, in order within each queue.

    Args:
        table: schema.RECEIVED or schema.READ; all queue ids are in ``queues``.
        topic: the topic of the messages.
        queues: the holders of the messages, by queue_id.
    """
    rows = Rows(topic, table)
    by_queue: dict[int, list[ReceivedMessage]] = {}
    n = table.num_rows
    places = zip(
        table.column("queue_id").to_pylist(),
        table.column("queue_offset").to_pylist(),
        _receipts(table, n),
        pc.binary_length(table.column("body")).to_pylist(),
        strict=True,
    )
    for row, (queue_id, offset, receipt, size) in enumerate(places):
        message = ReceivedMessage(
            rows,
            row,
            queue=queues[queue_id],
            queue_offset=offset,
            receipt_handle=receipt,
            size=size,
        )
        by_queue.setdefault(queue_id, []).append(message)
    return by_queue


def _receipts(table: pa.Table, n: int) -> list[str]:
    if "receipt_handle" not in table.column_names:
        return [""] * n
    handles: list[str] = table.column("receipt_handle").to_pylist()
    return handles
