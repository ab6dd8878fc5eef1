"""Which columns a consumer's keyed state may have: those that DuckDB keeps as they are."""

import string
from typing import Final

import pyarrow as pa

from rmq_pipeline.errors import TableSchemaError

#: The broker's own, beside the consumer's.
RESERVED: Final = ("message_group", "message_group_hash", "removed")
_UPPER_TO_LOWER: Final = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
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


def folded(name: str) -> str:
    """What DuckDB tells columns apart by: their names, whatever the case of ASCII letters."""
    return name.translate(_UPPER_TO_LOWER)


def check(state: pa.Schema) -> None:
    """Refuse columns that dispatch could not fold in, or nobody could read again.

    Args:
        state: the consumer's columns, and RESERVED ones, which are not looked at.

    Raises:
        TableSchemaError: a name or a type, with the column's name.
    """
    names = state.names
    known = {name.lower(): name for name in RESERVED}
    for name in names:
        _check_name(name, column=name)
        if name.lower() == _ORDER:
            raise TableSchemaError(f"No column of the state may be called {name}.")
        other = name if name in RESERVED else known.setdefault(name.lower(), name)
        if other != name or names.count(name) > 1:
            # DuckDB does not tell names apart by their case: it would rename one of the two.
            raise TableSchemaError(f"Column {name} of the state has the name of column {other}.")
    for field in state:
        if field.name not in RESERVED:
            of_type = field.type
            if pa.types.is_dictionary(of_type):  # its indices are made longer
                of_type = pa.dictionary(pa.int32(), of_type.value_type)
            _check_kept(of_type, column=field.name)
            _check_names_in(of_type, column=field.name)


def _check_name(name: str, *, column: str) -> None:
    """Refuse a name that DuckDB makes another one of: it makes up one, or ends it at the NUL."""
    if not name or "\0" in name:
        within = "" if name == column else f" has a part {name!r}, which"
        raise TableSchemaError(f"Column {column!r} of the state{within} has no name for DuckDB.")


def _check_names_in(of_type: pa.DataType, *, column: str) -> None:
    """Refuse such names of the parts of a type; only those of a struct are kept."""
    if pa.types.is_nested(of_type):
        for part in (of_type.field(i) for i in range(of_type.num_fields)):
            if pa.types.is_struct(of_type):
                _check_name(part.name, column=column)
            _check_names_in(part.type, column=column)


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


def stored_columns(state: pa.Schema) -> int:
    """As how many columns DuckDB keeps these; RESERVED ones do not count."""
    return sum(_stored(field.type) for field in state if field.name not in RESERVED)


def _stored(of_type: pa.DataType) -> int:
    if not any(is_one(of_type) for is_one in _NESTED):
        return 1
    return 1 + sum(_stored(of_type.field(i).type) for i in range(of_type.num_fields))
