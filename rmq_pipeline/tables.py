"""Tables from outside: validation before any value is read, and conversion to a schema.

Arrow trusts the metadata of a table. An offset beyond its buffer reads whatever lies there in
memory; a decreasing offset ends the process.
"""

import functools
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline import limits
from rmq_pipeline.errors import TableSchemaError
from rmq_pipeline.message import Int64s

#: Unused bytes that an array may hold before it is copied.
_SLACK_BYTES = 64 * 1024
#: Columns of nulls up to this length are cached.
_KEPT_ROWS = 1024
#: Cached tables of nulls, by schema (alive while its table is) and length.
_KEPT_TABLES = 256
_ABSENT: dict[tuple[int, int], tuple[pa.Schema, dict[str, pa.Array]]] = {}
_BITS: Final = 8
_VIEW_BYTES: Final = 16
_TEXTS: Final = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
)
_LARGE: Final = (pa.types.is_large_string, pa.types.is_large_binary, pa.types.is_large_list)
#: Types that are mended row by row: bytes and texts, and lists of any type.
_OF_BYTES: Final = (pa.types.is_string, pa.types.is_large_string, pa.types.is_large_binary)
_OF_LISTS: Final = (pa.types.is_list, pa.types.is_large_list, pa.types.is_map)
#: Maximum growth of overlapping lists, relative to the values that they share.
_COPIES_MOST: Final = 8


def sound(table: pa.Table, name: str) -> pa.Table:
    """Return the table if all columns are valid for their types, with texts in UTF-8.

    Raises:
        TableSchemaError: a column is damaged, or the value is not a table.
    """
    check(table, name)
    try:
        table.validate(full=True)
    except pa.ArrowException:
        for column in range(table.num_columns):
            _validate(table, column, name=name)
        raise
    _check_null_slots(table, name)
    return table


def check_readable(table: pa.Table, name: str) -> None:
    """Refuse a table whose columns cannot be read; texts that are not UTF-8 are allowed.

    Raises:
        TableSchemaError: a column is damaged.
    """
    try:
        table.validate(full=True)
    except pa.ArrowException:
        for column in range(table.num_columns):
            _validate(table, column, name=name, texts=False)
    _check_null_slots(table, name)


def check(table: pa.Table, name: str) -> None:
    """Refuse a value that is not a table, has too many rows, or names a column not in UTF-8.

    Raises:
        TableSchemaError: names the fault.
    """
    if not isinstance(table, pa.Table):
        raise TableSchemaError(f"{name} must be a pyarrow Table, not a {type(table).__name__}.")
    if table.num_rows > limits.TABLE_ROWS:
        raise TableSchemaError(
            f"{name} has {table.num_rows} rows; the limit is {limits.TABLE_ROWS}. Split it."
        )
    try:
        table.column_names  # noqa: B018 - reading them is what may fail
    except UnicodeDecodeError as error:
        raise TableSchemaError(f"The name of a column of {name} is not UTF-8.") from error


def _check_null_slots(table: pa.Table, name: str) -> None:
    """Refuse views of a negative length in rows that are null.

    Arrow does not validate null rows of views, but its cast adds up their lengths, and then wrote
    beyond its buffer.
    """
    for column, of_type in zip(table.column_names, table.schema.types, strict=True):
        # The text of a type names the types within; to walk the values of each column would take
        # a quarter of the time of a small send.
        if "_view" not in str(of_type):
            continue
        for chunk in table.column(column).chunks:
            for part in _parts(chunk):
                if (
                    part.null_count
                    and _is_view(part.type)
                    and (length := int(_view_lengths(part).min())) < 0
                ):
                    raise TableSchemaError(
                        f"Column {column} of {name} is damaged: a null row of type {part.type} has"
                        f" the length {length}; build the table again."
                    )


def _view_lengths(values: pa.Array) -> npt.NDArray[np.int32]:
    """Return the length that begins each view, also of null rows."""
    count, width = values.offset + len(values), _VIEW_BYTES // 4
    # The buffer may have extra bytes at its end.
    views = np.frombuffer(values.buffers()[1] or b"", np.int32, count * width)
    return views[::width][values.offset :]


def _validate(table: pa.Table, column: int, *, name: str, texts: bool = True) -> None:
    values = table.column(column)
    try:
        values.validate(full=True)
    except pa.ArrowException as error:
        if not texts and _is_sound_but_for_texts(values):
            return
        raise TableSchemaError(
            f"Column {table.column_names[column]} of {name} is damaged: {error}. Its offsets,"
            " lengths or texts do not fit its buffers; build the table again."
        ) from error


def _is_sound_but_for_texts(values: pa.ChunkedArray) -> bool:
    as_bytes = _with_bytes(values.type)
    if as_bytes is None:
        return False
    try:
        for chunk in values.chunks:
            chunk.validate()
            chunk.view(as_bytes).validate(full=True)
    except pa.ArrowException:
        return False
    return True


def _with_bytes(of_type: pa.DataType) -> pa.DataType | None:
    """Return the type with bytes in place of texts; None if it has no texts, or others, too."""
    if pa.types.is_string(of_type):
        return pa.binary()
    if pa.types.is_large_string(of_type):
        return pa.large_binary()
    if pa.types.is_list(of_type) and (within := _with_bytes(of_type.value_type)):
        return pa.list_(within)
    if pa.types.is_map(of_type):
        key, item = _with_bytes(of_type.key_type), _with_bytes(of_type.item_type)
        return pa.map_(key, item) if key and item else None
    return None


# ---------------------------------------------------------------------- sizes once expanded


def check_size(column: pa.ChunkedArray, name: str) -> None:
    """Refuse a valid column that expands to far more than its bytes, before it is expanded.

    A dictionary, a view or a run-end encoding repeats one value many times.

    Raises:
        TableSchemaError: expanded, the column exceeds the limit of a batch.
    """
    size = 0
    for chunk in column.chunks:
        most = limits.TABLE_ROWS + _BITS * chunk.get_total_buffer_size()
        for part in _parts(chunk):
            if len(part) > most:
                raise TableSchemaError(
                    f"Column {name} claims {len(part)} values in {most // _BITS} bytes, which"
                    " cannot hold them. Build the table again."
                )
            size += _written_out(part, name)
    if size > limits.BATCH_BYTES:
        raise TableSchemaError(
            f"Column {name} of type {column.type} takes {size} bytes once expanded; the limit of a"
            f" batch is {limits.BATCH_BYTES}. Split it."
        )


def _parts(values: pa.Array) -> Iterator[pa.Array]:
    """Yield an array and all its child arrays."""
    yield values
    of_type = values.type
    inner: list[pa.Array] = []
    if pa.types.is_map(of_type):
        inner = [values.keys, values.items]
    elif pa.types.is_struct(of_type) or pa.types.is_union(of_type):
        inner = [values.field(i) for i in range(of_type.num_fields)]
    elif pa.types.is_dictionary(of_type):
        inner = [values.dictionary]
    elif pa.types.is_nested(of_type) and not pa.types.is_run_end_encoded(of_type):
        inner = [values.values]
    for part in inner:
        yield from _parts(part)


def _written_out(values: pa.Array, name: str) -> int:
    """Return the bytes that encoded values take once expanded; 0 for plain ones."""
    of_type = values.type
    if pa.types.is_dictionary(of_type) or _is_view(of_type):
        return int(_sizes(values, name).sum())
    # Arrow's cast of a list view makes a list with wrong offsets, also where the view is sound.
    if (
        pa.types.is_run_end_encoded(of_type)
        or pa.types.is_list_view(of_type)
        or pa.types.is_large_list_view(of_type)
        or isinstance(of_type, pa.BaseExtensionType)
    ):
        raise TableSchemaError(f"Column {name} has type {of_type}. Convert it to plain values.")
    return 0


def _is_view(of_type: pa.DataType) -> bool:
    return bool(pa.types.is_string_view(of_type) or pa.types.is_binary_view(of_type))


def _sizes(values: pa.Array, name: str) -> Int64s:
    """Return the bytes of each text or number; 0 for null."""
    of_type = values.type
    sizes: Int64s
    if _is_view(of_type):
        sizes = _view_lengths(values).astype(np.int64)
        sizes *= values.is_valid().to_numpy(zero_copy_only=False)
        return sizes
    if pa.types.is_dictionary(of_type):
        sizes = _sizes(values.dictionary, name)
        sizes = sizes[values.indices.drop_null().to_numpy(zero_copy_only=False)]
        return sizes
    if any(is_one(of_type) for is_one in _TEXTS):
        sizes = pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False)
        return sizes.astype(np.int64)
    if pa.types.is_null(of_type) or pa.types.is_primitive(of_type):
        return np.full(len(values), _VIEW_BYTES, dtype=np.int64)
    raise TableSchemaError(f"Column {name} contains type {of_type}. Convert it to plain values.")


# ------------------------------------------------------ values that older versions accepted


def mended(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with unreadable values replaced; the batch itself if all can be read.

    A damaged body becomes empty and a damaged text null. Other damaged columns become null as a
    whole. Texts that are not UTF-8 can be read and stay; code that needs UTF-8 refuses their
    messages.
    """
    given = batch.columns
    columns = [_mended(column) for column in given]
    if all(new is old for new, old in zip(columns, given, strict=True)):
        return batch
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _mended(values: pa.Array) -> pa.Array:
    try:
        values.validate(full=True)
    except pa.ArrowException:
        if _is_sound_but_for_texts(pa.chunked_array([values])):
            return values
        is_body = pa.types.is_binary(values.type)
        if is_body or any(is_one(values.type) for is_one in _OF_BYTES):
            found = list(_readable(values))
            return pa.array([b"" if is_body and v is None else v for v in found], values.type)
        if any(is_one(values.type) for is_one in _OF_LISTS):
            return _mended_lists(values)
        if pa.types.is_struct(values.type):
            return _mended_struct(values)
        return pa.nulls(len(values), values.type)
    return values


def _mended_lists(values: pa.Array) -> pa.Array:
    """Lists or maps, null where their offsets are none of their values, or a value is damaged."""
    of_type, n = values.type, len(values)
    is_map = pa.types.is_map(of_type)
    given = [values.keys, values.items] if is_map else [values.values]
    parts = [_mended(part) for part in given]
    most = min(map(len, parts))
    ends = _ends(values)
    if ends is None:
        return pa.nulls(n, of_type)
    starts, stops = ends[:-1].astype(np.int64), ends[1:].astype(np.int64)
    keeps = _there(values) & (starts >= 0) & (starts <= stops) & (stops <= most)
    for part, before in zip(parts, given, strict=True):
        lost = np.zeros(most + 1, dtype=np.int64)  # damaged values before each place
        if part is not before:
            damaged = _there(before)[:most] & ~_there(part)[:most]
            lost[1:] = np.cumsum(damaged)
        keeps[keeps] &= lost[stops[keeps]] == lost[starts[keeps]]
    sizes = np.where(keeps, stops - starts, 0)
    # Lists may overlap where offsets go back; each is copied, and few are to grow into very many.
    keeps &= np.cumsum(sizes) <= _COPIES_MOST * most
    sizes[~keeps] = 0
    filled = np.concatenate([[0], np.cumsum(sizes)])
    places = np.repeat(starts - filled[:-1], sizes) + np.arange(filled[-1])
    parts = [part.take(pa.array(places)) for part in parts]
    inner = parts[0]
    if is_map:
        inner = pa.StructArray.from_arrays(parts, fields=[of_type.key_field, of_type.item_field])
    buffers = [pa.array(keeps).buffers()[1], pa.py_buffer(filled.astype(ends.dtype))]
    return pa.Array.from_buffers(of_type, n, buffers, children=[inner])


def _mended_struct(values: pa.Array) -> pa.Array:
    """Structs with their fields mended, each by itself."""
    parts = [_mended(values.field(i)) for i in range(values.type.num_fields)]
    if any(len(part) != len(values) for part in parts):
        return pa.nulls(len(values), values.type)
    gone = pa.array(~_there(values))
    return pa.StructArray.from_arrays(parts, fields=list(values.type), mask=gone)


def _there(values: pa.Array) -> npt.NDArray[np.bool_]:
    """Return True for each value that is not null; all False if the bitmap is too short."""
    bits = values.buffers()[0]
    if bits is not None and bits.size * _BITS < values.offset + len(values):
        return np.zeros(len(values), dtype=np.bool_)
    there: npt.NDArray[np.bool_] = values.is_valid().to_numpy(zero_copy_only=False)
    return there.copy()


def _ends(values: pa.Array) -> npt.NDArray[np.int32] | npt.NDArray[np.int64] | None:
    """Offsets of texts, bodies, lists or maps, one more than these; None: there are too few."""
    width = np.dtype(np.int64 if any(is_one(values.type) for is_one in _LARGE) else np.int32)
    held = values.buffers()[1] or b""
    try:
        return np.frombuffer(held, width, len(values) + 1, values.offset * width.itemsize)
    except ValueError:
        return None


def _readable(values: pa.Array) -> Iterator[bytes | str | None]:
    """Each body or text; None where its offsets are none of its bytes, or it is not UTF-8."""
    ends = _ends(values)
    if ends is None:
        yield from [None] * len(values)
        return
    held, is_text = memoryview(values.buffers()[2] or b""), "string" in str(values.type)
    there = _there(values).tolist()
    for start, stop, valid in zip(ends[:-1].tolist(), ends[1:].tolist(), there, strict=True):
        value = bytes(held[start:stop]) if valid and 0 <= start <= stop <= len(held) else None
        try:
            yield value.decode() if value is not None and is_text else value
        except UnicodeDecodeError:
            yield None


def with_sound_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows with U+FFFD for each byte that is not UTF-8; the log keeps the bytes.

    Older versions accepted such texts from clients. DuckDB refuses them, and one of them must not
    stop dispatch.

    Raises:
        pa.ArrowException: the rows are damaged in another way.
    """
    columns = [_sound(column) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _sound(column: pa.Array) -> pa.Array:
    if (as_bytes := _with_bytes(column.type)) is None:
        return column
    values = column.cast(as_bytes).to_pylist()
    return pa.array([_text(value) for value in values], column.type)


def _text(value: Any) -> Any:
    match value:
        case bytes():
            return value.decode(errors="replace")
        case list() | tuple():
            return type(value)(map(_text, value))
        case _:
            return value


# -------------------------------------------------------------------- columns of a schema


def columns_of(table: pa.Table, wanted: pa.Schema) -> dict[str, pa.Array]:
    """Return one contiguous array for each field of ``wanted``; nulls for an absent column.

    Raises:
        TableSchemaError: a column is missing, unknown, damaged, or does not cast to its type.
    """
    check(table, "the table")
    check_readable(table, "the table")
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
