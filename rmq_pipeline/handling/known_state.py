"""Conversion of recorded state to the columns that a consumer declares now.

Recorded state has the columns of the code that wrote it. Without the conversion, a consumer could
never settle again after a change of its columns.
"""

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.state_columns import folded


def nullable(state: pa.Schema) -> pa.Schema:
    """Return the schema with all columns nullable; the same object if they already are."""
    if all(field.nullable for field in state):
        return state
    return pa.schema([field.with_nullable(True) for field in state], state.metadata)


def as_declared(known: pa.Table, state: pa.Schema) -> pa.Table:
    """Return recorded states with message_group and exactly the declared columns.

    All columns are nullable. A value is null if it was not recorded, or cannot be cast to the
    column's type. Numbers are converted as the store converts them when a settle changes the
    column. From texts and times the store can convert more than this function.

    Args:
        known: ``message_group`` and columns as recorded.
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
    except Exception:  # noqa: BLE001 - Arrow's error for two types may have any class
        # One value that cannot be cast must not discard the others.
        values = [_cast_value(column, row, wanted=wanted) for row in range(len(column))]
        return pa.chunked_array([chunk for value in values for chunk in value.chunks], wanted)


def _cast_value(column: pa.ChunkedArray, row: int, *, wanted: pa.DataType) -> pa.ChunkedArray:
    try:
        # Casting a slice of a list array also reads the values outside the slice.
        nested = pa.types.is_nested(column.type)
        value = column.take(pa.array([row])) if nested else column.slice(row, 1)
        return _as_whole(value, wanted)
    except Exception:  # noqa: BLE001 - see above
        return pa.chunked_array([pa.nulls(1, wanted)])


def _as_whole(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    # An integer too long for a float becomes the nearest float, as in the store.
    nearest = pa.types.is_integer(column.type) and pa.types.is_floating(wanted)
    return column.cast(wanted, safe=not nearest)


def _rounded(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """Round fractions for an integer column as the store does when it changes the column."""
    if pa.types.is_integer(wanted):
        if pa.types.is_floating(column.type):
            return pc.round(column, round_mode="half_to_even")
        if pa.types.is_decimal(column.type):
            # Rounding up may add a digit.
            wide = column.cast(pa.decimal256(76, column.type.scale))
            return pc.round(wide, round_mode="half_towards_infinity")
    return column
