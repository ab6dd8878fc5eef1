"""Recorded state in the columns that a consumer declares today.

What was recorded has the columns of the code that wrote it. A consumer that could not read it would
never settle again, and only older code could help.
"""

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.state_columns import folded


def nullable(state: pa.Schema) -> pa.Schema:
    """The columns of states that may be missing; the same schema where all are nullable."""
    if all(field.nullable for field in state):
        return state
    return pa.schema([field.with_nullable(True) for field in state], state.metadata)


def as_declared(known: pa.Table, state: pa.Schema) -> pa.Table:
    """Recorded states with exactly the declared columns, and message_group before them.

    Null is what was not recorded, and a value that cannot be cast to its column's type: all columns
    are nullable. Numbers become the numbers that the store makes of them once a settle has changed
    the column; of texts and times it reads more than is read here.

    Args:
        known: ``message_group`` and columns as they were recorded.
        state: the consumer's columns.
    """
    state = nullable(state)
    recorded = {folded(name): known[name] for name in known.column_names}
    columns = [
        _cast(recorded[folded(field.name)], field.type)
        if folded(field.name) in recorded
        else pa.nulls(known.num_rows, field.type)
        for field in state
    ]
    groups = known["message_group"]
    return pa.table([groups, *columns], schema=pa.schema([("message_group", groups.type), *state]))


def _cast(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    column = _rounded(column, wanted)
    try:
        return _as_whole(column, wanted)
    except Exception:  # noqa: BLE001 - whatever it is that Arrow says to two types
        # One value that does not fit is no reason to lose the others.
        values = [_cast_value(column, row, wanted=wanted) for row in range(len(column))]
        return pa.chunked_array([chunk for value in values for chunk in value.chunks], wanted)


def _cast_value(column: pa.ChunkedArray, row: int, *, wanted: pa.DataType) -> pa.ChunkedArray:
    try:
        # The cast of a slice of lists looks at what the other lists hold, too.
        nested = pa.types.is_nested(column.type)
        value = column.take(pa.array([row])) if nested else column.slice(row, 1)
        return _as_whole(value, wanted)
    except Exception:  # noqa: BLE001 - as above
        return pa.chunked_array([pa.nulls(1, wanted)])


def _as_whole(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    # A number too long for a float is the nearest one, as in the store.
    nearest = pa.types.is_integer(column.type) and pa.types.is_floating(wanted)
    return column.cast(wanted, safe=not nearest)


def _rounded(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """Fractions that are to be whole, rounded as the store does once it changes the column."""
    if pa.types.is_integer(wanted):
        if pa.types.is_floating(column.type):
            return pc.round(column, round_mode="half_to_even")
        if pa.types.is_decimal(column.type):
            # Rounded up it may have a digit more.
            wide = column.cast(pa.decimal256(76, column.type.scale))
            return pc.round(wide, round_mode="half_towards_infinity")
    return column
