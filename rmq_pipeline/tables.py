"""Tables from outside: their columns by name, of the types that the schema says."""

import functools

import pyarrow as pa

from rmq_pipeline.errors import TableSchemaError

#: What an array may hold beyond its rows before it is copied.
_SLACK_BYTES = 64 * 1024
#: Columns of nulls up to this length are made once.
_KEPT_ROWS = 1024


def columns_of(table: pa.Table, wanted: pa.Schema) -> dict[str, pa.Array]:
    """One contiguous array for each field of ``wanted``; null where the table has no such column.

    Raises:
        TableSchemaError: a column is missing, unknown, or does not cast to its type.
    """
    if not isinstance(table, pa.Table):
        raise TableSchemaError(f"A pyarrow Table is needed, not {type(table).__name__}.")
    unknown = [name for name in table.column_names if wanted.get_field_index(name) < 0]
    if unknown:
        raise TableSchemaError(
            f"Column {unknown[0]} is unknown; known are {', '.join(wanted.names)}."
        )
    columns = {}
    for field in wanted:
        if table.schema.get_field_index(field.name) < 0:
            if not field.nullable:
                raise TableSchemaError(f"Column {field.name} is missing.")
            columns[field.name] = nulls(table.num_rows, field.type)
            continue
        columns[field.name] = _one(table.column(field.name), field)
    return columns


def nulls(n: int, of_type: pa.DataType) -> pa.Array:
    """A column of ``n`` nulls."""
    return _kept_nulls(n, of_type) if n <= _KEPT_ROWS else pa.nulls(n, of_type)


@functools.lru_cache(maxsize=256)
def _kept_nulls(n: int, of_type: pa.DataType) -> pa.Array:
    return pa.nulls(n, of_type)


def _compact(array: pa.Array) -> pa.Array:
    """The array without what lies around it; a slice would drag all of its parent to the disk."""
    if array.get_total_buffer_size() <= 2 * array.nbytes + _SLACK_BYTES:
        return array
    return array.take(pa.array(range(len(array)), pa.int64()))


def _one(column: pa.ChunkedArray, field: pa.Field) -> pa.Array:
    if column.type != field.type:
        try:
            column = column.cast(field.type)
        except (pa.ArrowException, ValueError) as error:
            raise TableSchemaError(
                f"Column {field.name} is {column.type} and must be {field.type}: {error}."
            ) from error
    if column.num_chunks == 1:
        return _compact(column.chunk(0))
    if column.num_chunks == 0:
        return pa.array([], field.type)
    combined = column.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined
