"""Analysis of a query with sqlglot: accepts one SELECT over the documented views, tells its reads.

``check`` is the first of three checks: sqlglot's tree of the query may contain only constructs
known to be harmless. DuckDB must then also parse it as one SELECT. Finally it runs in a read-only
transaction of an instance with locked settings and no file access.

``readings`` tells what a checked query reads: views and macro calls, with columns and conditions.
A query process receives these rows instead of the database, which a second process cannot open.
Extra columns or rows only cost time, but missing ones would give a wrong result. In case of doubt
everything is copied.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError, SqlglotError

from rmq_pipeline.errors import QueryError
from rmq_pipeline.store.statements import quoted

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
_DIALECT: Final = "duckdb"
#: DuckDB's schema of the views, which a query may name: database tools write it before each view.
SCHEMA: Final = "main"
#: Expressions allowed in a condition that is applied during copying: their text has the same
#: meaning in any query.
_PLAIN: Final = (
    *(exp.Column, exp.Identifier, exp.Literal, exp.Null, exp.Boolean, exp.Paren, exp.Neg),
    *(exp.And, exp.Or, exp.Not, exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE),
    *(exp.Between, exp.In, exp.Is),
)


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
    of_schema = {f"{SCHEMA}.{name.lower()}" for name in views}
    names = {name.lower() for name in views}
    names |= {cte.alias.lower() for cte in tree.find_all(exp.CTE)}
    functions = _TABLE_FUNCTIONS | {name.lower() for name in macros}
    for node in tree.walk():
        if not (isinstance(node, exp.Table) and _qualified(node) in of_schema):
            _check_node(node, names, functions=functions)


#: Remembers accepted queries: parsing takes 2 ms, and sensors ask the same every few seconds.
_checked: Final = lru_cache(maxsize=256)(_check)


def _parse(sql: str) -> list[exp.Expr]:
    try:
        parsed = sqlglot.parse(sql, dialect=_DIALECT)
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


def _qualified(table: exp.Table) -> str:
    """Return schema and name of a table, as tools write it; "" if it is not named like this."""
    is_view = isinstance(table.this, exp.Identifier) and not table.catalog
    return f"{table.db}.{table.name}".lower() if is_view and table.db else ""


def _check_table(table: exp.Table, names: Collection[str], *, functions: Collection[str]) -> None:
    source = table.this
    if isinstance(source, exp.Func):
        name = _function_name(source)
        if name not in functions:
            raise QueryError(f"The table function {name} is not allowed in a query.")
        return
    if table.args.get("db") or table.args.get("catalog"):
        raise QueryError(f"{table.sql(dialect=_DIALECT)} is not a view. {_known(names)}")
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


@dataclass(frozen=True)
class Reading:
    """A view or macro call that a query reads."""

    #: The name in the query, and the SQL after FROM.
    name: str
    source: str
    #: SQL of the macro's argument; None for a view.
    argument: str | None = None
    alias: str = ""
    #: Lower-case names in the query that may be columns of it; None: all columns are needed.
    names: frozenset[str] | None = None
    #: Conditions that every row of the result fulfils; used only if their columns exist.
    conditions: tuple[exp.Expr, ...] = field(default=(), compare=False)

    def columns(self, present: Collection[str]) -> list[str]:
        """Return the columns that the query needs, at least one."""
        if self.names is None:
            return list(present)
        return [name for name in present if name.lower() in self.names] or list(present)[:1]

    def condition(self, present: Collection[str]) -> str:
        """Return a condition that all needed rows fulfil, as SQL."""
        known = {name.lower() for name in present}
        plain = [
            f"({each.sql(_DIALECT)})"
            for each in self.conditions
            if all(column.name.lower() in known for column in each.find_all(exp.Column))
        ]
        return " AND ".join(plain) or "true"


def readings(sql: str, views: Collection[str], *, macros: Collection[str]) -> list[Reading]:
    """Return each view and macro call that a checked query reads, without duplicates.

    Raises:
        QueryError: the argument of a macro depends on rows of the query.
    """
    tree = sqlglot.parse_one(sql, dialect=_DIALECT)
    by_name = {view.lower(): view for view in views}
    tables: dict[str, list[exp.Table]] = {}
    for table in tree.find_all(exp.Table):
        if not isinstance(table.this, exp.Func) and table.name.lower() in by_name:
            tables.setdefault(by_name[table.name.lower()], []).append(table)
    names = _Names(tree)
    found = [_of_view(view, uses, names=names) for view, uses in tables.items()]
    return [*found, *_calls(tree, {name.lower(): name for name in macros})]


def _of_view(view: str, uses: list[exp.Table], *, names: "_Names") -> Reading:
    needed: set[str] | None = set()
    for table in uses:
        of_table = names.of(table)
        needed = None if needed is None or of_table is None else needed | of_table
    conditions = tuple(_conditions(uses[0])) if len(uses) == 1 else ()
    return Reading(
        name=view,
        source=quoted(view),
        alias=uses[0].alias_or_name if len(uses) == 1 else view,
        names=None if needed is None else frozenset(needed),
        conditions=conditions,
    )


class _Names:
    """Names in a query, grouped by their qualifier."""

    def __init__(self, tree: exp.Expr) -> None:
        #: Names that may belong to any table. Those in ``_alone`` are unqualified and may also
        #: stand for a whole row.
        self._free: set[str] = set()
        self._alone: set[str] = set()
        self._of: dict[str, set[str]] = {}
        #: Qualifiers of stars, and ids of SELECTs with an unqualified star.
        self._starred: set[str] = set()
        self._all: set[int] = set()
        for node in tree.find_all(exp.Identifier):
            self._take(node)
        for star in tree.find_all(exp.Star, exp.Columns, exp.PositionalColumn):
            if isinstance(star.parent, exp.Column) and star.parent.table:
                self._starred.add(star.parent.table.lower())
            elif not isinstance(star.parent, exp.Count):
                self._all.add(id(star.find_ancestor(exp.Select)))

    def _take(self, node: exp.Identifier) -> None:
        name, column = node.name.lower(), node.parent
        if not isinstance(column, exp.Column):
            self._free.add(name)
        elif column.table and node.arg_key == "this" and not column.args.get("db"):
            self._of.setdefault(column.table.lower(), set()).add(name)
        else:
            self._free.add(name)
            if not column.table:
                self._alone.add(name)

    def of(self, table: exp.Table) -> set[str] | None:
        """Return the names that may be columns of this table; None if any column may be used."""
        names = {table.name.lower(), table.alias_or_name.lower()}
        select = table.find_ancestor(exp.Select)
        whole = select is None or id(select) in self._all or self._starred & names
        alias = table.args.get("alias")
        renamed = bool(alias and alias.columns) or table.args.get("pivots")
        # In `SELECT m FROM messages AS m` the value is a row, as in `SELECT main.messages FROM …`.
        rows = self._alone | self._of.get(SCHEMA, set())
        if whole or renamed or rows & names or _is_natural(table):
            return None
        return self._free.union(*(self._of.get(name, set()) for name in names))


def _is_natural(table: exp.Table) -> bool:
    select = table.find_ancestor(exp.Select)
    return select is not None and any(join.args.get("method") for join in select.find_all(exp.Join))


def _is_column_of(table: exp.Table, column: exp.Column) -> bool:
    """Return True if a column's text means the same where only the alias of the table is known."""
    qualifier = column.table.lower()
    return not column.args.get("db") and qualifier in {"", table.alias_or_name.lower()}


def _conditions(table: exp.Table) -> Iterator[exp.Expr]:
    """Yield the conditions on a table if its SELECT reads no other table."""
    select = table.find_ancestor(exp.Select)
    where = select.args.get("where") if select is not None else None
    if select is None or where is None or not isinstance(table.parent, exp.From):
        return
    alone = not (table.args.get("joins") or select.args.get("joins") or select.args.get("laterals"))
    if table.parent.parent is not select or not alone or table.args.get("sample"):
        return
    for each in where.this.flatten() if isinstance(where.this, exp.And) else [where.this]:
        columns = list(each.find_all(exp.Column))
        own = all(_is_column_of(table, column) for column in columns)
        if columns and own and all(isinstance(node, _PLAIN) for node in each.walk()):
            yield each


def _calls(tree: exp.Expr, macros: Mapping[str, str]) -> Iterator[Reading]:
    """Yield each call of a macro that stands for a view, without duplicates."""
    seen = set()
    for call in tree.find_all(exp.Anonymous):
        name = macros.get(call.name.lower())
        if name is None or call.sql(_DIALECT) in seen:
            continue
        seen.add(call.sql(_DIALECT))
        given = [
            each.expression if isinstance(each, exp.PropertyEQ | exp.Kwarg) else each
            for each in call.expressions
        ]
        if len(given) != 1 or list(given[0].find_all(exp.Column, exp.Query)):
            raise QueryError(
                f"{call.sql(_DIALECT)} depends on rows of the query. The query runs in a process "
                "of its own, because it uses a function that DuckDB may not interrupt.",
                remedy=f"Give {name} a constant, or apply that function in a second step.",
            )
        argument = given[0].sql(_DIALECT)
        yield Reading(name, f"{quoted(name)}({argument})", argument=argument, alias=name)
