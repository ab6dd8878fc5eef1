"""Columns of a consumer's keyed state: the types that DuckDB stores without change."""

import string
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.errors import MessageBodyTooLargeError, TableSchemaError
from rmq_pipeline.message import Int64s

#: The broker's own columns of the state table.
RESERVED: Final = ("message_group", "message_group_hash", "removed")
_UPPER_TO_LOWER: Final = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
#: Column that dispatch adds while it merges state rows.
_ORDER: Final = "staged_order"
#: Types that DuckDB returns unchanged; ``_unkept`` decides on the others.
_KEPT: Final = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_float32,
    pa.types.is_float64,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_timestamp,
)
#: Types whose parts are checked one by one.
_NESTED: Final = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_struct,
    pa.types.is_map,
)
_TEXTS: Final = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
)


def folded(name: str) -> str:
    """Return the name as DuckDB compares it: with ASCII letters in lower case."""
    return name.translate(_UPPER_TO_LOWER)


def check(state: pa.Schema) -> None:
    """Refuse columns that dispatch cannot store, or that could not be read back.

    Args:
        state: the consumer's columns, and RESERVED ones, which are not checked.

    Raises:
        TableSchemaError: a name or a type is not allowed; the error names the column.
    """
    names = state.names
    known = {name.lower(): name for name in RESERVED}
    for name in names:
        _check_name(name, column=name)
        if name.lower() == _ORDER:
            raise TableSchemaError(f"No column of the state may be called {name}.")
        other = name if name in RESERVED else known.setdefault(name.lower(), name)
        if other != name or names.count(name) > 1:
            # DuckDB compares names without case and would rename one of the two.
            raise TableSchemaError(
                f"Column {name} of the state clashes with column {other}; DuckDB ignores case."
            )
    for field in state:
        if field.name not in RESERVED:
            of_type = field.type
            if pa.types.is_dictionary(of_type):  # DuckDB returns wider indices
                of_type = pa.dictionary(pa.int32(), of_type.value_type)
            _check_kept(of_type, column=field.name)
            _check_names_in(of_type, column=field.name)


def _check_name(name: str, *, column: str) -> None:
    """Refuse a name that DuckDB changes: it invents one for an empty name, and cuts at a NUL."""
    if not name or "\0" in name:
        part = "" if name == column else f" its part {name!r}:"
        raise TableSchemaError(
            f"Column {column!r} of the state:{part} DuckDB cannot store an empty name or a NUL."
        )


def _check_names_in(of_type: pa.DataType, *, column: str) -> None:
    """Refuse such names in the parts of a type; DuckDB stores only those of a struct."""
    if pa.types.is_nested(of_type):
        for part in (of_type.field(i) for i in range(of_type.num_fields)):
            if pa.types.is_struct(of_type):
                _check_name(part.name, column=column)
            _check_names_in(part.type, column=column)


def _check_kept(of_type: pa.DataType, *, column: str) -> None:
    """Refuse a type that DuckDB does not return unchanged, including its parts."""
    wrong = _unkept(of_type)
    if wrong is not None:
        within = "" if wrong == of_type else f", with {wrong} in it"
        raise TableSchemaError(
            f"Column {column} of the state is {of_type}{within}, which DuckDB changes."
        )


def _unkept(of_type: pa.DataType) -> pa.DataType | None:
    """Return the part of a type that DuckDB changes; None if there is none."""
    if any(is_one(of_type) for is_one in _KEPT):
        return None
    if pa.types.is_dictionary(of_type):
        texts = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
        fits = of_type.value_type in texts and of_type.index_type == pa.int32()
        return None if fits else of_type
    if pa.types.is_decimal(of_type):
        # DuckDB stores up to 38 digits, and no scale that is negative or above the precision.
        fits = of_type.bit_width <= 128 and 0 <= of_type.scale <= of_type.precision
        return None if fits else of_type
    if not any(is_one(of_type) for is_one in _NESTED):
        return of_type
    try:
        fields = [of_type.field(i) for i in range(of_type.num_fields)]
        inner = (_unkept(field.type) for field in fields if field.name is not None)
        return next((part for part in inner if part is not None), None)
    except UnicodeDecodeError:  # the name of a field is not UTF-8
        return of_type


def stored_columns(state: pa.Schema) -> int:
    """Return the number of DuckDB columns for a state, without RESERVED ones."""
    return sum(_stored(field.type) for field in state if field.name not in RESERVED)


def _stored(of_type: pa.DataType) -> int:
    if not any(is_one(of_type) for is_one in _NESTED):
        return 1
    return 1 + sum(_stored(of_type.field(i).type) for i in range(of_type.num_fields))


def check_rows(rows: pa.Table, *, most_bytes: int) -> None:
    """Refuse a row with more bytes than dispatch can take.

    Raises:
        MessageBodyTooLargeError: names the row's message group.
    """
    if rows.nbytes <= most_bytes and not any(_is_encoded(field.type) for field in rows.schema):
        return
    sizes = np.zeros(rows.num_rows, dtype=np.int64)
    for column in rows.columns:
        sizes += np.concatenate([_sizes(chunk) for chunk in column.chunks])
    row = int(np.argmax(sizes))
    if sizes[row] > most_bytes:
        raise MessageBodyTooLargeError(
            f"The state of message group {rows['message_group'][row].as_py()} takes {sizes[row]}"
            f" bytes; the limit is {most_bytes}.",
            remedy="Store less in it, or raise the broker's setting duckdb_memory_bytes.",
        )


def _is_encoded(of_type: pa.DataType) -> bool:
    parts = (of_type.field(i).type for i in range(of_type.num_fields))
    return pa.types.is_dictionary(of_type) or any(map(_is_encoded, parts))


def _sizes(values: pa.Array) -> Int64s:
    """Return the bytes of each value once expanded, as DuckDB stores it."""
    of_type = values.type
    if pa.types.is_dictionary(of_type):
        own = pa.array(_sizes(values.dictionary))
        return _numbers(own.take(values.indices))
    if pa.types.is_struct(of_type):
        whole = np.zeros(len(values), dtype=np.int64)
        for part in values.flatten():
            whole += _sizes(part)
        return whole
    if pa.types.is_nested(of_type):
        before = np.append(0, np.cumsum(_sizes(values.values)))
        if pa.types.is_fixed_size_list(of_type):
            bounds = (values.offset + np.arange(len(values) + 1)) * of_type.list_size
        else:
            bounds = values.offsets.to_numpy()
        sizes: Int64s = np.diff(before[bounds])
        return sizes
    if pa.types.is_string_view(of_type) or pa.types.is_binary_view(of_type):
        values = values.cast(pa.large_binary())
    if any(is_one(values.type) for is_one in _TEXTS):
        return _numbers(pc.binary_length(values))
    width = 0 if pa.types.is_null(of_type) else -(-of_type.bit_width // 8)
    return np.full(len(values), width, dtype=np.int64)


def _numbers(lengths: pa.Array) -> Int64s:
    found: Int64s = lengths.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return found
