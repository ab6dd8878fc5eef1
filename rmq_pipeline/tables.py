"""Conversion of tables from outside to the columns and types of a schema."""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmq_pipeline.errors import TableSchemaError
from rmq_pipeline.sound_tables import check_readable, check_size, check_structure

#: Unused bytes that an array may hold before it is copied.
_SLACK_BYTES = 64 * 1024
#: Columns of nulls up to this length are cached.
_KEPT_ROWS = 1024
#: Cached tables of nulls, by schema (alive while its table is) and length.
_KEPT_TABLES = 256
_ABSENT: dict[tuple[int, int], tuple[pa.Schema, dict[str, pa.Array]]] = {}


def columns_of(table: pa.Table, wanted: pa.Schema) -> dict[str, pa.Array]:
    """Return one contiguous array for each field of ``wanted``; nulls for an absent column.

    Raises:
        TableSchemaError: a column is missing, unknown, damaged, or does not cast to its type.
    """
    check_structure(table)
    names = table.column_names
    unknown = [name for name in names if wanted.get_field_index(name) < 0]
    if unknown:
        raise TableSchemaError(
            f"Column {unknown[0]} is unknown; known are {', '.join(wanted.names)}."
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TableSchemaError(f"Column {twice} occurs more than once.")
    columns = absent(wanted, table.num_rows)
    for name in names:
        columns[name] = _one(table.column(name), wanted.field(name))
    if len(names) < len(columns):
        _check_required(wanted, names)
    return columns


def absent(wanted: pa.Schema, n: int) -> dict[str, pa.Array]:
    """Return nulls for every field by name; cached by the schema's id, as hashing one is slow."""
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
    """Return integers as a column over the same memory; pa.array takes several times as long."""
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(_NUMBERS[values.dtype], len(values), [None, buffer])


def nulls(n: int, of_type: pa.DataType) -> pa.Array:
    """Return a column of ``n`` nulls."""
    return _kept_nulls(n, of_type) if n <= _KEPT_ROWS else pa.nulls(n, of_type)


@functools.lru_cache(maxsize=256)
def _kept_nulls(n: int, of_type: pa.DataType) -> pa.Array:
    return pa.nulls(n, of_type)


def _compact(array: pa.Array) -> pa.Array:
    """Copy a small slice of a large array; otherwise all of its parent would go to disk."""
    if array.get_total_buffer_size() <= 2 * array.nbytes + _SLACK_BYTES:
        return array
    return array.take(pa.array(range(len(array)), pa.int64()))


def _one(column: pa.ChunkedArray, field: pa.Field) -> pa.Array:
    if column.type != field.type:
        check_size(column, field.name)
        try:
            column = column.cast(field.type)
        except (pa.ArrowException, ValueError) as error:
            raise TableSchemaError(
                f"Column {field.name} is {column.type} and must be {field.type}: {error}."
            ) from error
        # Arrow's casts have bugs: a wrong offset would store bytes of other users.
        check_readable(pa.table({field.name: column}), "the table")
    if len(column) == 0:  # an empty column may come without buffers
        return pa.array([], field.type)
    if column.num_chunks == 1:
        return _compact(column.chunk(0))
    return contiguous(column)


def contiguous(column: pa.ChunkedArray) -> pa.Array:
    """Return the column as one array.

    Raises:
        TableSchemaError: its texts take more than 2 GiB, the maximum of an array.
    """
    combined = column.combine_chunks()
    if not isinstance(combined, pa.ChunkedArray):
        return combined
    if combined.num_chunks > 1:
        raise TableSchemaError(f"A column of {column.nbytes} bytes does not fit in one array.")
    return combined.chunk(0) if combined.num_chunks else pa.array([], column.type)
