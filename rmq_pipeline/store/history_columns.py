"""Columns of keyed state whose names and types change with the consumer's code."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.state_columns import folded

#: Precision of Arrow's widest decimal type.
_DIGITS_MAX: Final = 76
#: Match every text that Arrow parses as an integer, and as another number. Some matches are out of
#: range for a type.
_WHOLE: Final = "^-?([0-9]+|0[xX][0-9a-fA-F]+)$"
_NUMBER: Final = r"^[+-]?([0-9.]+([eE][+-]?[0-9]+)?|(?i:inf(inity)?|nan)(\(.*\))?)$"


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
    parts = [part for chunk in column.chunks for part in _parts(_numbers(chunk, to), to)]
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


def _numbers(values: pa.Array, to: pa.DataType) -> pa.Array:
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
