"""Determines what a checked query reads: views and macro calls, with columns and conditions.

A query process receives these rows instead of the database, which a second process cannot open.
Extra columns or rows only cost time, but missing ones would give a wrong result. In case of doubt
everything is copied.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import sqlglot
from sqlglot import exp

from rmq_pipeline.errors import QueryError
from rmq_pipeline.store.statements import quoted

_DIALECT: Final = "duckdb"
#: Expressions allowed in a condition that is applied during copying: their text has the same
#: meaning in any query.
_PLAIN: Final = (
    *(exp.Column, exp.Identifier, exp.Literal, exp.Null, exp.Boolean, exp.Paren, exp.Neg),
    *(exp.And, exp.Or, exp.Not, exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE),
    *(exp.Between, exp.In, exp.Is),
)


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
        # In `SELECT m FROM messages AS m` the value is a row.
        if whole or renamed or self._alone & names or _is_natural(table):
            return None
        return self._free.union(*(self._of.get(name, set()) for name in names))


def _is_natural(table: exp.Table) -> bool:
    select = table.find_ancestor(exp.Select)
    return select is not None and any(join.args.get("method") for join in select.find_all(exp.Join))


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
        own = all(column.table.lower() in {"", table.alias_or_name.lower()} for column in columns)
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
