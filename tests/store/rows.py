"""Messages, events and keyed state as a broker would stage them, for the tests of dispatch."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from rmq_pipeline import schema
from rmq_pipeline.message import hash64
from rmq_pipeline.store.database import Database
from rmq_pipeline.store.events import Kind
from rmq_pipeline.store.log.stretch import Rows, Stretch

Row = dict[str, Any]
Part = tuple[int, pa.RecordBatch]

START_MS = 1_700_000_000_000
_NO_EVENT: Row = {
    "group_id": 0,
    "topic_id": 0,
    "queue_id": -1,
    "queue_offset": -1,
    "attempt": 0,
    "visible_at_ms": 0,
    "delivery": 0,
    "epoch": 0,
    "message_group_hash": 0,
    "client_id": None,
    "detail": None,
}


def hash_of(message_group: str) -> int:
    """The hash of one message group."""
    return int(hash64(pa.array([message_group]))[0])


def message(topic_id: int, queue_id: int, queue_offset: int, **columns: Any) -> Row:
    """A message row; what is not given is null, its times count up with the offset."""
    group = columns.get("message_group")
    return {
        "message_id": f"m-{topic_id}-{queue_id}-{queue_offset}",
        "message_group_hash": hash_of(group) if group else 0,
        "body": b"body",
        "born_at_ms": START_MS + queue_offset,
        "stored_at_ms": START_MS + queue_offset,
        "topic_id": topic_id,
        "queue_id": queue_id,
        "queue_offset": queue_offset,
        **columns,
    }


def messages(*rows: Row) -> Part:
    """A section of messages."""
    filled = [{name: row.get(name) for name in schema.MESSAGE.names} for row in rows]
    return 1, pa.RecordBatch.from_pylist(filled, schema=schema.MESSAGE)


def event(kind: Kind, **columns: Any) -> Row:
    """An event row; what is not given is unused."""
    detail = columns.get("detail")
    if isinstance(detail, Mapping):
        columns["detail"] = json.dumps(detail)
    return {**_NO_EVENT, "kind": int(kind), "at_ms": START_MS, **columns}


def events(*rows: Row) -> Part:
    """A section of events."""
    return 2, pa.RecordBatch.from_pylist(list(rows), schema=schema.EVENT)


def on_queue(kind: Kind, queue_offset: int, **columns: Any) -> Row:
    """An event of group 1 on queue 0 of topic 2."""
    place = {"group_id": 1, "topic_id": 2, "queue_id": 0, "queue_offset": queue_offset}
    return event(kind, **{**place, **columns})


def topic(topic_id: int, name: str, **fields: Any) -> Row:
    """A TOPIC event."""
    detail = {
        "name": name,
        "topic_id": topic_id,
        "type": "normal",
        "queues": 1,
        "partition_time": "stored",
        "created_at_ms": START_MS,
        **fields,
    }
    return event(Kind.TOPIC, topic_id=topic_id, detail=detail)


def group(group_id: int, name: str, **fields: Any) -> Row:
    """A GROUP event."""
    detail = {
        "name": name,
        "group_id": group_id,
        "order": "none",
        "max_attempts": 3,
        "backoff_ms": [10, 20],
        "on_failure": "dead_letter",
        "created_at_ms": START_MS,
        **fields,
    }
    return event(Kind.GROUP, group_id=group_id, detail=detail)


def keyed(
    rows: Sequence[Row], *, group_id: int = 1, topic_id: int = 2, **types: pa.DataType
) -> Part:
    """A section of keyed state; ``types`` are those of the consumer's own columns."""
    columns = pa.schema(
        [
            ("message_group", pa.string()),
            ("message_group_hash", pa.int64()),
            ("removed", pa.bool_()),
            *types.items(),
        ],
        metadata={"group_id": str(group_id), "topic_id": str(topic_id)},
    )
    filled = [
        {"removed": False, "message_group_hash": hash_of(row["message_group"]), **row}
        for row in rows
    ]
    return 3, pa.RecordBatch.from_pylist(filled, schema=columns)


def dispatch(database: Database, *frames: Sequence[Part]) -> None:
    """One transaction of these frames, at the positions that follow."""
    position = database.dispatched
    made = []
    for parts in frames:
        found = []
        for kind, batch in parts:
            found.append(Rows(kind, batch, [position + 64], [batch.num_rows]))
            position += 128
        position += 64
        made.append(Stretch(position, found))
    database.dispatch(made)


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    """A table's rows as tuples, in order."""
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))
