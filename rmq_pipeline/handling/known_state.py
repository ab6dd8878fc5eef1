"""Recorded state in the columns that a consumer declares today.

What was recorded has the columns of the code that wrote it. A consumer that could not read it would
never settle again, and only older code could help.
"""

import pyarrow as pa


def as_declared(known: pa.Table, state: pa.Schema) -> pa.Table:
    """Recorded states with exactly the declared columns, and message_group before them.

    Null is what was not recorded, and a value that cannot be cast to its column's type.

    Args:
        known: ``message_group`` and columns as they were recorded.
        state: the consumer's columns.
    """
    columns = [
        _cast(known[field.name], field.type)
        if field.name in known.column_names
        else pa.nulls(known.num_rows, field.type)
        for field in state
    ]
    groups = known["message_group"]
    return pa.table([groups, *columns], schema=pa.schema([("message_group", groups.type), *state]))


def _cast(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    try:
        return column.cast(wanted)
    except pa.ArrowException:
        # One value that does not fit is no reason to lose the others.
        values = [_cast_value(value, wanted) for value in column]
        return pa.chunked_array([pa.array(values, wanted)])


def _cast_value(value: pa.Scalar, wanted: pa.DataType) -> pa.Scalar:
    try:
        return value.cast(wanted)
    except pa.ArrowException:
        return pa.scalar(None, wanted)
