"""Answers to the questions of database tools: tables, types of tables, and facts about the SQL.

There are no catalogs, and one schema: DuckDB's ``main``, whose views a query may name.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from importlib import metadata
from typing import Any, Final

import pyarrow as pa

from rmq_pipeline import limits
from rmq_pipeline.store.query.analysis import SCHEMA

_VIEW: Final = "VIEW"
#: Facts that a tool may ask for in one call, and characters of a name pattern.
_ASKED: Final = 1_000
_PATTERN: Final = 1_000


def _of(fields: str) -> pa.Schema:
    """Return the schema of a text: names and types, with ``?`` where a value may be null."""
    found = []
    for field in fields.split(", "):
        name, kind = field.split()
        found.append(pa.field(name, _TYPES[kind.rstrip("?")], nullable=kind.endswith("?")))
    return pa.schema(found)


_TYPES: Final = {
    "text": pa.string(),
    "texts": pa.list_(pa.field("item", pa.string(), nullable=False)),
    "bytes": pa.binary(),
    "bool": pa.bool_(),
    "uint8": pa.uint8(),
    "int32": pa.int32(),
}
_KEYS: Final = _of(
    "pk_catalog_name text?, pk_db_schema_name text?, pk_table_name text, pk_column_name text,"
    " fk_catalog_name text?, fk_db_schema_name text?, fk_table_name text, fk_column_name text,"
    " key_sequence int32, fk_key_name text?, pk_key_name text?, update_rule uint8,"
    " delete_rule uint8"
)
_TABLES: Final = _of("catalog_name text?, db_schema_name text?, table_name text, table_type text")
#: Schemas of the answers, by command.
_ANSWERS: Final[Mapping[str, pa.Schema]] = {
    "CommandGetCatalogs": _of("catalog_name text"),
    "CommandGetDbSchemas": _of("catalog_name text?, db_schema_name text"),
    "CommandGetTables": _TABLES,
    "CommandGetTableTypes": _of("table_type text"),
    "CommandGetPrimaryKeys": _of(
        "catalog_name text?, db_schema_name text?, table_name text, column_name text,"
        " key_name text?, key_sequence int32"
    ),
    "CommandGetExportedKeys": _KEYS,
    "CommandGetImportedKeys": _KEYS,
    "CommandGetCrossReference": _KEYS,
    "CommandGetXdbcTypeInfo": _of(
        "type_name text, data_type int32, column_size int32?, literal_prefix text?,"
        " literal_suffix text?, create_params texts?, nullable int32, case_sensitive bool,"
        " searchable int32, unsigned_attribute bool?, fixed_prec_scale bool, auto_increment bool?,"
        " local_type_name text?, minimum_scale int32?, maximum_scale int32?, sql_data_type int32,"
        " datetime_subcode int32?, num_prec_radix int32?, interval_precision int32?"
    ),
}
COMMANDS: Final = frozenset({*_ANSWERS, "CommandGetSqlInfo"})

Views = Callable[[], Mapping[str, pa.Schema]]


def answer(name: str, command: Any, *, views: Views) -> pa.Table:
    """Return the answer to a command.

    Args:
        name: one of COMMANDS.
        command: its message.
        views: returns the views with their columns.
    """
    match name:
        case "CommandGetSqlInfo":
            return _facts(command.info[:_ASKED])
        case "CommandGetDbSchemas":
            is_asked = _is_in_schema(command)
            return _rows(name, [(None, SCHEMA)] if is_asked else [])
        case "CommandGetTables":
            return _tables(command, views)
        case "CommandGetTableTypes":
            return _rows(name, [(_VIEW,)])
    return _rows(name, [])


def schema(name: str, command: Any) -> pa.Schema:
    """Return the columns of the answer to a command."""
    if name == "CommandGetSqlInfo":
        return _facts(()).schema
    return _ANSWERS[name] if name != "CommandGetTables" else _tables_schema(command)


def _tables_schema(command: Any) -> pa.Schema:
    of_table = pa.field("table_schema", pa.binary(), nullable=False)
    return _TABLES.append(of_table) if command.include_schema else _TABLES


def _rows(name: str, rows: Iterable[tuple[object, ...]]) -> pa.Table:
    return _table(_ANSWERS[name], rows)


def _table(schema: pa.Schema, rows: Iterable[tuple[object, ...]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    arrays = [pa.array(each, of.type) for each, of in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def _tables(command: Any, views: Views) -> pa.Table:
    is_asked = not command.table_types or _VIEW in command.table_types
    found = views() if is_asked and _is_in_schema(command) else {}
    matches = _matcher(command, "table_name_filter_pattern")
    rows = [
        (None, SCHEMA, name, _VIEW, columns.serialize().to_pybytes())
        for name, columns in found.items()
        if matches(name)
    ]
    schema = _tables_schema(command)
    return _table(schema, [row[: len(schema)] for row in rows])


def _is_in_schema(command: Any) -> bool:
    """Return True if a command asks for the schema of the views."""
    is_catalog = not command.HasField("catalog") or not command.catalog
    return is_catalog and _matcher(command, "db_schema_filter_pattern")(SCHEMA)


def _matcher(command: Any, field: str) -> Callable[[str], bool]:
    """Return the filter of a pattern with ``%``, ``_``, and a backslash before either."""
    if not command.HasField(field):
        return lambda _: True
    pattern = getattr(command, field)[:_PATTERN]
    # Python's own engine takes exponential time for many stars; a run of % is one %.
    pieces = re.findall(r"\\?.", re.sub(r"%+", "%", pattern), re.DOTALL)
    return lambda name: _matches(pieces, name)


def _matches(pieces: list[str], name: str) -> bool:
    """Match a name in time proportional to both lengths."""
    reached = {0}
    for piece in pieces:
        if piece == "%":
            reached = set(range(min(reached, default=len(name) + 1), len(name) + 1))
        elif piece == "_":
            reached = {at + 1 for at in reached if at < len(name)}
        else:
            reached = {at + 1 for at in reached if name[at : at + 1] == piece[-1]}
    return len(name) in reached


# --------------------------------------------------------------------------------------- facts

#: Fields of the union in which facts are answered; the position is the type code.
_FACT: Final = (
    ("string_value", pa.string()),
    ("bool_value", pa.bool_()),
    ("bigint_value", pa.int64()),
    ("int32_bitmask", pa.int32()),
    ("string_list", pa.list_(pa.string())),
    ("int32_to_int32_list_map", pa.map_(pa.int32(), pa.list_(pa.int32()))),
)
_TEXT, _BOOL, _NUMBER, _BITS, _LIST, _MAP = range(6)
#: Numbers of FlightSql.proto's enum SqlInfo, by kind of value. JDBC's driver reads a missing one
#: as null, and tools fail on it. So facts that do not matter here have values, too.
_YES: Final = (3, 4, 9, 506, 515, 516, 518, 520, 521, 523, 539)
_NO: Final = (
    *(5, 10, 500, 501, 502, 519, 524, 527, 532, 536, 537, 556, 563, 565, 566),
    *range(572, 577),
)
_BITMASKS: Final = {
    8: 0,  # no transactions
    100: limits.FLIGHT_SQL_HANDLE_MS,
    101: 0,
    503: 1,  # names ignore case
    505: 1,
    507: 3,  # nulls last
    522: 3,
    525: 3,
    526: 1,
    528: 6,  # bits 1 and 2: limited and full outer joins
    533: 0,  # tools need not name the schema
    534: 0,
    535: 0,
    538: 15,
    540: 3,
    564: 1,
    567: 2,  # forward only
    568: 0,
    569: 2,
    570: 0,
    571: 0,
}
_TEXTS: Final = {504: '"', 513: "\\", 514: "", 529: "schema", 530: "", 531: ""}
_LISTS: Final = range(508, 513)
_CONVERT: Final = 517
#: 0: no limit, or unknown. The last one is the default isolation: no transactions.
_LIMITS: Final = {
    **dict.fromkeys((*range(541, 556), *range(558, 562)), 0),
    557: limits.FLIGHT_SQL_CHARACTERS,
    562: 0,
}


@cache
def _known_facts() -> dict[int, tuple[int, Any]]:
    """Return the facts: type code and value, by number."""
    texts = {0: "rmq_pipeline", 1: metadata.version("rmq_pipeline"), 2: pa.__version__, **_TEXTS}
    found: dict[int, tuple[int, Any]] = {}
    found.update((number, (_TEXT, text)) for number, text in texts.items())
    found.update((number, (_BOOL, True)) for number in _YES)
    found.update((number, (_BOOL, False)) for number in _NO)
    found.update((number, (_NUMBER, most)) for number, most in _LIMITS.items())
    found.update((number, (_BITS, bits)) for number, bits in _BITMASKS.items())
    found.update((number, (_LIST, [])) for number in _LISTS)
    found[_CONVERT] = (_MAP, [])
    return dict(sorted(found.items()))


def _facts(asked: Collection[int]) -> pa.Table:
    """Return the facts with these numbers; all of them if none are named."""
    known = _known_facts()
    wanted = [number for number in dict.fromkeys(asked) if number in known] if asked else [*known]
    values: list[list[Any]] = [[] for _ in _FACT]
    codes, offsets = [], []
    for number in wanted:
        code, value = known[number]
        codes.append(code)
        offsets.append(len(values[code]))
        values[code].append(value)
    union = pa.UnionArray.from_dense(
        pa.array(codes, pa.int8()),
        pa.array(offsets, pa.int32()),
        [pa.array(each, of) for each, (_, of) in zip(values, _FACT, strict=True)],
        [name for name, _ in _FACT],
    )
    fields = [
        pa.field("info_name", pa.uint32(), nullable=False),
        pa.field("value", union.type, nullable=False),
    ]
    return pa.Table.from_arrays([pa.array(wanted, pa.uint32()), union], schema=pa.schema(fields))
