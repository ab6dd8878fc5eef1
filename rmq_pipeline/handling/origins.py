"""Origins: the message of each sink row, and of each message that a replay publishes."""

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.handling.handler import OutcomeError

PLACE: Final = pa.schema([("queue_id", pa.int32()), ("queue_offset", pa.int64())])
ORIGIN: Final = pa.schema([("topic", pa.string()), *PLACE])


def with_origin_columns(sink_schema: pa.Schema) -> pa.Schema:
    """Return the schema with the missing columns of ORIGIN.

    Raises:
        ValueError: the schema has such a column with another type.
    """
    for field in ORIGIN:
        at = sink_schema.get_field_index(field.name)
        if at >= 0 and sink_schema.field(at).type != field.type:
            raise ValueError(f"Column {field.name} of the sink is to be {field.type}.")
        if at < 0:
            sink_schema = sink_schema.append(field)
    return sink_schema


def with_origin(rows: pa.Table, messages: pa.Table, *, topic: str) -> pa.Table:
    """Return the rows of a call with the missing columns of ORIGIN.

    With queue_id and queue_offset a handler names the message of each row. If rows lack these
    columns and the call has one message, the rows belong to that message. A call of several
    messages fails, and is repeated with one message at a time.

    Raises:
        OutcomeError: rows lack a column, and the call has several messages.
    """
    if not isinstance(rows, pa.Table) or not rows.num_rows:
        return rows
    for field in PLACE:
        if field.name not in rows.column_names:
            if messages.num_rows != 1:
                raise OutcomeError(f"Rows of several messages lack the column {field.name}.")
            value = messages[field.name][0].cast(field.type)
            rows = rows.append_column(field.name, pa.repeat(value, rows.num_rows))
    if "topic" not in rows.column_names:
        rows = rows.append_column("topic", pa.repeat(topic, rows.num_rows))
    return rows


def identified(published: pa.Table, messages: pa.Table, *, publication: str) -> pa.Table:
    """Return published messages with ids; a missing id is derived from the origin.

    The id names the message for which it was published, and its number among them. It does not
    depend on the content.

    Args:
        published: schema.SEND.
        messages: the one message of the call.
        publication: prefix that distinguishes ids of different replays, groups and topics.
    """
    at = published.column_names.index("message_id")
    own = published.column(at)
    if not own.null_count:
        return published
    place = "-".join(str(messages[name][0].as_py()) for name in PLACE.names)
    made = pa.array([f"{publication}-{place}-{n}" for n in range(len(own))], own.type)
    return published.set_column(at, "message_id", pc.coalesce(own, made))
