"""Columns of a consumer's keyed state: types that DuckDB stores unchanged, and changes of columns.

The names and types of the columns change with the consumer's code.
"""

import itertools
import string
from collections.abc import Iterable, Iterator, Mapping
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
#: Precision of Arrow's widest decimal type.
_DIGITS_MAX: Final = 76
#: Match every text that Arrow parses as an integer, and as another number. Some matches are out of
#: range for a type.
_WHOLE: Final = "^-?([0-9]+|0[xX][0-9a-fA-F]+)$"
_NUMBER: Final = r"^[+-]?([0-9.]+([eE][+-]?[0-9]+)?|(?i:inf(inity)?|nan)(\(.*\))?)$"


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


def newest(*schemas: pa.Schema) -> dict[str, pa.Field]:
    """Merge the columns of successive schemas, by folded name; the last schema wins.

    Arrow's null type carries no information. A column or a nested field of that type keeps the
    earlier type.
    """
    found: dict[str, pa.Field] = {}
    for field in itertools.chain(*schemas):
        name = folded(field.name)
        if name not in found:
            found[name] = field
        elif not pa.types.is_null(field.type):
            found[name] = field.with_type(_completed(field.type, found[name].type))
    return found


def telling(rows: pa.Table, known: Mapping[str, pa.Field]) -> pa.Table:
    """Drop columns of Arrow's null type if a type is known; complete null types in nested columns.

    Otherwise the column would get another type, and the values of other rows would become null.

    Args:
        known: columns by folded name.
    """
    for field in rows.schema:
        if (before := known.get(folded(field.name))) is None:
            continue
        of_type = _completed(field.type, before.type)
        if pa.types.is_null(field.type):
            rows = rows.drop_columns([field.name])
        elif of_type != field.type:
            at = rows.schema.get_field_index(field.name)
            rows = rows.set_column(at, field.with_type(of_type), rows.column(at).cast(of_type))
    return rows


def _completed(of_type: pa.DataType, known: pa.DataType) -> pa.DataType:
    """Replace Arrow's null type, as of empty lists, by the known type; also in nested types."""
    if pa.types.is_null(of_type):
        return known
    if pa.types.is_list(of_type) and pa.types.is_list(known):
        inner = of_type.value_field
        return pa.list_(inner.with_type(_completed(inner.type, known.value_type)))
    if pa.types.is_struct(of_type) and pa.types.is_struct(known):
        places = [(part, known.get_field_index(part.name)) for part in of_type]
        return pa.struct(
            [
                part if at < 0 else part.with_type(_completed(part.type, known.field(at).type))
                for part, at in places
            ]
        )
    return of_type


def converted(column: pa.ChunkedArray, to: pa.DataType) -> pa.ChunkedArray:
    """Convert a column to another type; values that cannot be converted become null.

    Times are truncated to the new unit.
    """
    if column.type == to:
        return column
    if pa.types.is_fixed_size_binary(to) and not pa.types.is_nested(column.type):
        column = _of_width(column, to.byte_width)
    if pa.types.is_integer(column.type) and pa.types.is_decimal(to):
        # Arrow casts integers to a decimal only if every value of the integer type fits.
        column = column.cast(pa.decimal256(_DIGITS_MAX, to.scale))
    if _cast(pa.nulls(1, column.type), to) is None:
        return pa.chunked_array([pa.nulls(len(column), to)])
    parts = [part for chunk in column.chunks for part in _parts(_number_texts(chunk, to), to)]
    return pa.chunked_array(parts, to)


def together(tables: Iterable[pa.Table], *, fixed: pa.Schema) -> pa.Table:
    """Concatenate tables that follow each other, with the union of their columns.

    Each column gets the common type of its types, or the newest type if there is none. Rows of one
    table keep their order.

    Args:
        tables: at least one; the columns of ``fixed`` come first, then columns that differ by more
            than case.
        fixed: columns with which all tables begin.
    """
    alike = _by_schema(tables)
    own: dict[str, pa.Field] = {}
    for table in alike:
        for field in list(table.schema)[len(fixed) :]:
            known = own.get(folded(field.name))
            of_type = _common(known.type, field.type) if known else field.type
            own[folded(field.name)] = pa.field(field.name, of_type)
    schema = pa.schema([*fixed, *own.values()])
    return pa.concat_tables(_shaped(table, schema, fixed=len(fixed)) for table in alike)


def _of_width(column: pa.ChunkedArray, width: int) -> pa.ChunkedArray:
    """Replace values of another length by null, vectorized because there may be many."""
    if not (pa.types.is_binary(column.type) or pa.types.is_fixed_size_binary(column.type)):
        return column
    fits = pc.equal(pc.binary_length(column), width)
    return pc.if_else(fits, column, pa.scalar(None, column.type))


def _number_texts(values: pa.Array, to: pa.DataType) -> pa.Array:
    """Replace texts that are not numbers by null, vectorized because there may be many."""
    is_whole = pa.types.is_integer(to)
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        return values
    if not (is_whole or pa.types.is_floating(to) or pa.types.is_decimal(to)):
        return values
    if _cast(values, to) is not None:
        return values
    fits = pc.match_substring_regex(values, _WHOLE if is_whole else _NUMBER)
    return pc.if_else(fits, values, pa.scalar(None, values.type))


def _parts(values: pa.Array, to: pa.DataType) -> Iterator[pa.Array]:
    """Cast values; halve the array until a value that cannot be cast is alone, and null it."""
    whole = _cast(values, to)
    if whole is not None:
        yield whole
    elif len(values) == 1:
        yield pa.nulls(1, to)
    else:
        middle = len(values) // 2
        for start, stop in ((0, middle), (middle, len(values))):
            # Casting a slice of a list array also reads the values outside the slice.
            nested = pa.types.is_nested(values.type)
            rows = pa.array(range(start, stop), pa.int64()) if nested else None
            yield from _parts(values[start:stop] if rows is None else values.take(rows), to)


def _cast(values: pa.Array, to: pa.DataType) -> pa.Array | None:
    try:
        return pc.cast(values, options=pc.CastOptions(to, allow_time_truncate=True))
    except pa.ArrowException:
        return None


def _by_schema(tables: Iterable[pa.Table]) -> list[pa.Table]:
    """Concatenate tables of equal schema; the schema written last comes last."""
    found: dict[pa.Schema, list[pa.Table]] = {}
    last: list[pa.Table] = []
    for table in tables:
        # Comparing two schemas is cheaper than hashing one, and most neighbours are equal.
        if not last or not last[-1].schema.equals(table.schema):
            last = found.pop(table.schema, [])
            found[table.schema] = last
        last.append(table)
    return [pa.concat_tables(of_schema) for of_schema in found.values()]


def _common(old: pa.DataType, new: pa.DataType) -> pa.DataType:
    """Return the common type of both; the newer type if Arrow has none."""
    try:
        both = [pa.schema([("column", of_type)]) for of_type in (old, new)]
        return pa.unify_schemas(both, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return new


def _shaped(table: pa.Table, schema: pa.Schema, *, fixed: int) -> pa.Table:
    """Return the table with the columns of a schema; missing columns are null."""
    places = {folded(name): at for at, name in enumerate(table.column_names) if at >= fixed}
    columns = table.columns[:fixed]
    for field in list(schema)[fixed:]:
        at = places.get(folded(field.name))
        columns.append(
            pa.chunked_array([pa.nulls(table.num_rows, field.type)])
            if at is None
            else converted(table.column(at), field.type)
        )
    return pa.table(columns, schema=schema)
