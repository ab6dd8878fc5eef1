"""Columns of a sink's rows that say which message each is of: topic, queue_id, queue_offset."""

from typing import Final

import pyarrow as pa

from rmq_pipeline.handling.handler import OutcomeError

PLACE: Final = pa.schema([("queue_id", pa.int32()), ("queue_offset", pa.int64())])
ORIGIN: Final = pa.schema([("topic", pa.string()), *PLACE])


def with_origin_columns(sink_schema: pa.Schema) -> pa.Schema:
    """The schema with the columns that it lacks.

    Raises:
        ValueError: it has one of them with another type.
    """
    for field in ORIGIN:
        at = sink_schema.get_field_index(field.name)
        if at >= 0 and sink_schema.field(at).type != field.type:
            raise ValueError(f"Column {field.name} of the sink is to be {field.type}.")
        if at < 0:
            sink_schema = sink_schema.append(field)
    return sink_schema


def with_origin(rows: pa.Table, messages: pa.Table, *, topic: str) -> pa.Table:
    """Rows of a call with the columns that they lack.

    A handler says with queue_id and queue_offset which message each row is of. Rows without them
    are of the call's message where it has one; a call of several fails, and so is made again for
    each message alone.

    Raises:
        OutcomeError: the call has several messages.
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
