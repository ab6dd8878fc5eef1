"""Tables from outside: their columns by name, of the types that the schema says."""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline.errors import TableSchemaError

#: What an array may hold beyond its rows before it is copied.
_SLACK_BYTES = 64 * 1024
#: Columns of nulls up to this length are made once.
_KEPT_ROWS = 1024
#: Tables of nulls that are kept, by schema (alive as long as its table is) and length.
_KEPT_TABLES = 256
_ABSENT: dict[tuple[int, int], tuple[pa.Schema, dict[str, pa.Array]]] = {}


def columns_of(table: pa.Table, wanted: pa.Schema) -> dict[str, pa.Array]:
    """One contiguous array for each field of ``wanted``; null where the table has no such column.

    Raises:
        TableSchemaError: a column is missing, unknown, or does not cast to its type.
    """
    if not isinstance(table, pa.Table):
        raise TableSchemaError(f"A pyarrow Table is needed, not {type(table).__name__}.")
    names = table.column_names
    unknown = [name for name in names if wanted.get_field_index(name) < 0]
    if unknown:
        raise TableSchemaError(
            f"Column {unknown[0]} is unknown; known are {', '.join(wanted.names)}."
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TableSchemaError(f"Column {twice} is there more than once.")
    columns = absent(wanted, table.num_rows)
    for name in names:
        columns[name] = _one(table.column(name), wanted.field(name))
    if len(names) < len(columns):
        _check_required(wanted, names)
    return columns


def absent(wanted: pa.Schema, n: int) -> dict[str, pa.Array]:
    """Nulls for every field by name. Schemas are constants of this library: hashing is slow."""
    if n > _KEPT_ROWS:
        return {field.name: nulls(n, field.type) for field in wanted}
    kept = _ABSENT.get((id(wanted), n))
    if kept is None:
        if len(_ABSENT) >= _KEPT_TABLES:
            _ABSENT.clear()
        kept = wanted, {field.name: nulls(n, field.type) for field in wanted}
        _ABSENT[id(wanted), n] = kept
    return kept[1].copy()


def _check_required(wanted: pa.Schema, names: list[str]) -> None:
    for field in wanted:
        if not field.nullable and field.name not in names:
            raise TableSchemaError(f"Column {field.name} is missing.")


_NUMBERS = {np.dtype(np.int64): pa.int64(), np.dtype(np.int32): pa.int32()}


def numbers(values: npt.NDArray[np.signedinteger[Any]]) -> pa.Array:
    """Whole numbers as a column over the same memory; pa.array takes several times as long."""
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(_NUMBERS[values.dtype], len(values), [None, buffer])


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
    return contiguous(column)


def contiguous(column: pa.ChunkedArray) -> pa.Array:
    """The column as one array.

    Raises:
        TableSchemaError: its texts take more than 2 GiB, which no array holds.
    """
    combined = column.combine_chunks()
    if not isinstance(combined, pa.ChunkedArray):
        return combined
    if combined.num_chunks > 1:
        raise TableSchemaError(f"A column of {column.nbytes} bytes does not fit in one array.")
    return combined.chunk(0) if combined.num_chunks else pa.array([], column.type)
