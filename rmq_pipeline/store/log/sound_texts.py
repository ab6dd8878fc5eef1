"""Replacement of invalid UTF-8, which older versions accepted from clients.

The log keeps the original bytes. Derived data gets a replacement character (U+FFFD) for each bad
byte. DuckDB accepts only valid UTF-8, and one bad text must not stop dispatch.
"""

from typing import Any

import pyarrow as pa


def with_sound_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows with invalid UTF-8 replaced.

    Raises:
        pa.ArrowException: the rows are damaged in another way.
    """
    columns = [_sound(column) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _sound(column: pa.Array) -> pa.Array:
    if (of_bytes := _of_bytes(column.type)) is None:
        return column
    values = column.cast(of_bytes).to_pylist()
    return pa.array([_text(value) for value in values], column.type)


def _of_bytes(type_: pa.DataType) -> pa.DataType | None:
    """Return the type with binary in place of string; None if it contains no string."""
    if pa.types.is_string(type_):
        return pa.binary()
    if pa.types.is_map(type_):
        return pa.map_(pa.binary(), pa.binary())
    if pa.types.is_list(type_) and pa.types.is_string(type_.value_type):
        return pa.list_(pa.binary())
    return None


def _text(value: Any) -> Any:
    match value:
        case bytes():
            return value.decode(errors="replace")
        case list() | tuple():
            return type(value)(map(_text, value))
        case _:
            return value
