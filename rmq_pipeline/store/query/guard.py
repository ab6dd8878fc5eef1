"""Accepts a query only if it is one SELECT over the documented views.

This is the first of three checks: sqlglot's tree of the query may contain only constructs known to
be harmless. DuckDB must then also parse it as one SELECT. Finally it runs in a read-only
transaction of an instance with locked settings and no file access.
"""

from collections.abc import Collection
from functools import lru_cache
from typing import Final

import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError, SqlglotError

from rmq_pipeline.errors import QueryError

_TABLE_FUNCTIONS: Final = frozenset(
    {"unnest", "explode", "generate_series", "range", "json_each", "json_tree"}
)
#: Functions with side effects, functions that wait, and functions that read beyond the tables.
_REFUSED_FUNCTIONS: Final = frozenset(
    {
        "current_setting",
        "currval",
        "getenv",
        "getvariable",
        "nextval",
        "query",
        "query_table",
        "read_blob",
        "read_text",
        "setseed",
        "setval",
        "sleep_ms",
        "write_log",
    }
)
#: Longer queries are checked each time.
_REMEMBERED_CHARACTERS: Final = 4_096


def check(sql: str, views: Collection[str], *, macros: Collection[str] = ()) -> None:
    """Refuse a query that is not one SELECT over these views and its own WITH tables.

    Args:
        macros: table macros that stand for a view, such as ``FROM in_flight_at(…)``.

    Raises:
        QueryError: the query does not parse, or contains something else; the error says what or
            where.
    """
    check_it = _checked if len(sql) <= _REMEMBERED_CHARACTERS else _check
    check_it(sql, frozenset(views), macros=frozenset(macros))


def _check(sql: str, views: frozenset[str], *, macros: frozenset[str]) -> None:
    statements = _parse(sql)
    if len(statements) != 1:
        raise QueryError(f"The query has {len(statements)} statements, not one.")
    tree = statements[0]
    if not isinstance(tree, exp.Query) or isinstance(tree, exp.Table):
        what = tree.name if isinstance(tree, exp.Command) else tree.key
        raise QueryError(f"A query must be a SELECT, not {what.upper()}.")
    names = {name.lower() for name in views}
    names |= {cte.alias.lower() for cte in tree.find_all(exp.CTE)}
    functions = _TABLE_FUNCTIONS | {name.lower() for name in macros}
    for node in tree.walk():
        _check_node(node, names, functions=functions)


#: Remembers accepted queries: parsing takes 2 ms, and sensors ask the same every few seconds.
_checked: Final = lru_cache(maxsize=256)(_check)


def _parse(sql: str) -> list[exp.Expr]:
    try:
        parsed = sqlglot.parse(sql, dialect="duckdb")
    except ParseError as error:
        raise QueryError(_where(error)) from error
    except SqlglotError as error:
        place = error.__cause__ or error
        raise QueryError(f"The query does not parse: {place}.") from error
    return [statement for statement in parsed if statement is not None]


def _where(error: ParseError) -> str:
    if not error.errors:
        return f"The query does not parse: {error}"
    first = error.errors[0]
    near = first.get("highlight") or ""
    return (
        f"The query does not parse at line {first.get('line')}, column {first.get('col')}, "
        f"near {near!r}: {first.get('description')}."
    )


def _check_node(node: exp.Expr, names: Collection[str], *, functions: Collection[str]) -> None:
    if isinstance(node, exp.Table):
        _check_table(node, names, functions=functions)
    elif isinstance(node, exp.CTE):
        if not isinstance(node.this, exp.Query):
            raise QueryError(f"WITH {node.alias} is not a SELECT.")
    elif isinstance(node, (exp.Command, exp.DDL, exp.DML, exp.Into)) and not isinstance(
        node, exp.Query
    ):
        raise QueryError(f"{node.key.upper()} is not allowed in a query.")
    elif isinstance(node, exp.Func):
        _check_function(node)


def _check_table(table: exp.Table, names: Collection[str], *, functions: Collection[str]) -> None:
    source = table.this
    if isinstance(source, exp.Func):
        name = _function_name(source)
        if name not in functions:
            raise QueryError(f"The table function {name} is not allowed in a query.")
        return
    if table.args.get("db") or table.args.get("catalog"):
        raise QueryError(f"{table.sql(dialect='duckdb')} is not a view. {_known(names)}")
    if table.name.lower() not in names:
        raise QueryError(f"There is no view {table.name}. {_known(names)}")


def _check_function(function: exp.Func) -> None:
    name = _function_name(function)
    reads_files = name.startswith(("read_", "parquet_", "pragma_", "duckdb_")) or "scan" in name
    if reads_files or name in _REFUSED_FUNCTIONS:
        raise QueryError(f"The function {name} is not allowed in a query.")


def _function_name(function: exp.Func) -> str:
    name = function.name if isinstance(function, exp.Anonymous) else function.sql_name()
    return name.lower()


def _known(names: Collection[str]) -> str:
    return f"There are: {', '.join(sorted(names))}."
