"""Keyed state as a settle brings it: checked, and in the columns that the log has.

What dispatch could not fold in would be answered, and would then keep the broker from starting.
"""

from typing import Final

import pyarrow as pa

from rmq_pipeline.broker import arguments
from rmq_pipeline.broker.engine import Engine
from rmq_pipeline.errors import RequestError, TableSchemaError
from rmq_pipeline.message import hash64
from rmq_pipeline.tables import contiguous

_RESERVED = ("message_group", "message_group_hash", "removed")
#: What dispatch adds to the rows of a state while it folds them in.
_ORDER: Final = "staged_order"
#: What DuckDB takes of a consumer's state and gives back unchanged; _unkept has the rest.
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
#: Whose parts are looked at one by one.
_NESTED: Final = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_struct,
    pa.types.is_map,
)


def state_batch(
    engine: Engine, group: str, *, topic: str, table: pa.Table
) -> pa.RecordBatch | None:
    """Keyed state as the log keeps it: message_group, its hash, removed, the consumer's columns."""
    if not topic:
        raise RequestError("State needs the topic whose messages it belongs to.")
    group_id = engine.state.group(group).group_id
    topic_id = engine.state.topic(topic).topic.topic_id
    _check_state(arguments.sound(table, "state"))
    if not table.num_rows:
        return None
    table = table.combine_chunks()
    keys = _cast(table, "message_group", to=pa.string())
    if keys.null_count:
        raise TableSchemaError("Column message_group of the state has a null.")
    removed = pa.repeat(pa.scalar(False), len(keys))
    if "removed" in table.column_names:
        removed = _cast(table, "removed", to=pa.bool_()).fill_null(False)
    own = [name for name in table.column_names if name not in _RESERVED]
    whole = pa.table(
        {
            "message_group": keys,
            "message_group_hash": pa.array(hash64(keys)),
            "removed": removed,
            **{name: _indexed_alike(contiguous(table.column(name))) for name in own},
        }
    )
    ids = {b"group_id": str(group_id).encode(), b"topic_id": str(topic_id).encode()}
    return whole.replace_schema_metadata(ids).combine_chunks().to_batches()[0]


def _check_state(table: pa.Table) -> None:
    """Refuse what dispatch could not fold in, or nobody could read again: the log keeps it."""
    names = table.column_names
    if "message_group" not in names:
        raise TableSchemaError("Column message_group is missing in the state.")
    known = {name.lower(): name for name in _RESERVED}
    for name in names:
        if name.lower() == _ORDER:
            raise TableSchemaError(f"No column of the state may be called {name}.")
        other = name if name in _RESERVED else known.setdefault(name.lower(), name)
        if other != name or names.count(name) > 1:
            # DuckDB does not tell names apart by their case: it would rename one of the two.
            raise TableSchemaError(f"Column {name} of the state has the name of column {other}.")
    for field in table.schema:
        if field.name not in _RESERVED:
            of_type = field.type
            if pa.types.is_dictionary(of_type):  # its indices are made longer
                of_type = pa.dictionary(pa.int32(), of_type.value_type)
            _check_kept(of_type, column=field.name)


def _check_kept(of_type: pa.DataType, *, column: str) -> None:
    """Refuse a type that does not come back from DuckDB as it went, with all that it is made of."""
    wrong = _unkept(of_type)
    if wrong is not None:
        within = "" if wrong == of_type else f", with {wrong} in it"
        raise TableSchemaError(
            f"Column {column} of the state is {of_type}{within}, which DuckDB does not keep."
        )


def _unkept(of_type: pa.DataType) -> pa.DataType | None:
    """The part of a type that DuckDB does not keep; None when it keeps all."""
    if any(is_one(of_type) for is_one in _KEPT):
        return None
    if pa.types.is_dictionary(of_type):
        texts = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
        fits = of_type.value_type in texts and of_type.index_type == pa.int32()
        return None if fits else of_type
    if pa.types.is_decimal(of_type):
        # Of decimals, 38 digits are kept, and none of them is left out before the point.
        fits = of_type.bit_width <= 128 and 0 <= of_type.scale <= of_type.precision
        return None if fits else of_type
    if not any(is_one(of_type) for is_one in _NESTED):
        return of_type
    try:
        fields = [of_type.field(i) for i in range(of_type.num_fields)]
        inner = (_unkept(field.type) for field in fields if field.name is not None)
        return next((part for part in inner if part is not None), None)
    except UnicodeDecodeError:  # the name of a field is no text
        return of_type


def _cast(table: pa.Table, name: str, *, to: pa.DataType) -> pa.Array:
    column = table.column(name)
    try:
        return contiguous(column.cast(to))
    except (pa.ArrowException, ValueError) as error:
        raise TableSchemaError(
            f"Column {name} of the state is {column.type} and must be {to}: {error}."
        ) from error


def _indexed_alike(column: pa.Array) -> pa.Array:
    """Short indices made longer: all of the state has more values than what one settle changes."""
    if pa.types.is_dictionary(column.type) and column.type.index_type != pa.int32():
        return column.dictionary_decode().dictionary_encode()
    return column
