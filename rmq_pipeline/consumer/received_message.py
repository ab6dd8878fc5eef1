"""A message as a listener gets it: a view of a row of what was pulled."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from rmq_pipeline.consumer.process_queue import ProcessQueue

#: Bodies longer than this on average are made Python's one by one, and not kept twice.
_LONG_BODY_BYTES: Final = 64 * 1024


class Rows:
    """Messages of one pull; a column becomes Python's when somebody first asks for it."""

    __slots__ = ("_columns", "_table", "topic")

    def __init__(self, topic: str, table: pa.Table) -> None:
        self.topic = topic
        self._table = table
        self._columns: dict[str, list[Any]] = {}

    def value(self, name: str, row: int) -> Any:
        """One value; None where there is no such column."""
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
    """Values of a column, each made when it is asked for."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, row: Any) -> Any:
        return self._column[row].as_py()


class ReceivedMessage:
    """One message; what it holds is read when it is asked for."""

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
        #: Where this consumer keeps it.
        self.queue = queue
        self.queue_offset = queue_offset
        #: Of its delivery; empty when it was read by offset.
        self.receipt_handle = receipt_handle
        #: Of its body, in bytes.
        self.size = size
        #: How often the listener has failed with it since it was pulled.
        self.failures = 0

    def __repr__(self) -> str:
        return f"<message {self.topic}/{self.queue_id}/{self.queue_offset}>"

    @property
    def topic(self) -> str:
        """Where it was sent to."""
        return self._rows.topic

    @property
    def queue_id(self) -> int:
        """Its queue in the topic."""
        return self.queue.queue.queue_id

    @property
    def body(self) -> bytes:
        """What was sent."""
        body: bytes = self._rows.value("body", self._row)
        return body

    @property
    def message_id(self) -> str:
        """Given by its producer, or by the broker."""
        message_id: str = self._rows.value("message_id", self._row)
        return message_id

    @property
    def tag(self) -> str | None:
        """What filters go by."""
        tag: str | None = self._rows.value("tag", self._row)
        return tag

    @property
    def keys(self) -> list[str]:
        """What it is found by."""
        return list(self._rows.value("keys", self._row) or ())

    @property
    def message_group(self) -> str | None:
        """Messages of one group come in order."""
        message_group: str | None = self._rows.value("message_group", self._row)
        return message_group

    @property
    def properties(self) -> dict[str, str]:
        """The producer's own."""
        return dict(self._rows.value("properties", self._row) or ())

    @property
    def born_at_ms(self) -> int:
        """When its producer made it."""
        return int(self._rows.value("born_at_ms", self._row))

    @property
    def stored_at_ms(self) -> int:
        """When the broker stored it."""
        return int(self._rows.value("stored_at_ms", self._row))

    @property
    def delivery_attempt(self) -> int:
        """Which time it is given to a listener, as far as is known; the first is 1."""
        return int(self._rows.value("delivery_attempt", self._row) or 1) + self.failures

    @property
    def reconsume_times(self) -> int:
        """How often it has failed before: RocketMQ's word, one less than delivery_attempt."""
        return self.delivery_attempt - 1


def messages_of(
    table: pa.Table, topic: str, *, queues: dict[int, "ProcessQueue"]
) -> dict[int, list[ReceivedMessage]]:
    """The rows of a pull as messages, of each queue in order.

    Args:
        table: schema.RECEIVED, or schema.READ, of queues that are in ``queues``.
        queues: by queue_id.
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
