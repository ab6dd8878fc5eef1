"""Uses of the view ``messages`` in a query, and the columns that the query names of each.

DuckDB's syntax tree tells the scopes. In case of doubt a name may be a column of messages: that
reads a body too much.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeAlias

from rmq_pipeline import schema

#: The view, and the columns that only a query that names them has.
VIEW: Final = "messages"
COLUMNS: Final = {name: schema.MESSAGE.field(name).type for name in ("body", "properties")}
_BODY: Final = "body"
_TEXT_TYPES: Final = frozenset({"varchar", "text", "string", "char", "bpchar", "json"})
_NODES: Final = frozenset(
    {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE", "STATEMENT_NODE"}
)

Node: TypeAlias = dict[str, Any]


@dataclass(eq=False)
class Source:
    """A table, view or subquery in FROM, with the columns that it surely has."""

    alias: str
    names: frozenset[str]


@dataclass(eq=False)
class Use(Source):
    """A use of the view messages."""

    node: Node
    scope: "Scope"
    #: Those of COLUMNS that the query may name of this use.
    columns: set[str] = field(default_factory=set)

    @property
    def is_joined_inner(self) -> bool:
        """True if rows of messages that no row of the join has change nothing."""
        joins = self.scope.joins
        return not self.scope.select.get("sample") and all(
            each["join_type"] == "INNER" and each["ref_type"] in {"REGULAR", "CROSS"}
            for each in joins
        )


@dataclass(eq=False)
class Scope:
    """A SELECT with its sources, and what it contains beside its subqueries."""

    select: Node
    parent: "Scope | None"
    #: WITH entries that it may name, the outer ones first.
    withs: list[Node]
    #: True if it is in the FROM of its parent.
    is_source: bool
    sources: list[Source] = field(default_factory=list)
    joins: list[Node] = field(default_factory=list)
    stars: list[Node] = field(default_factory=list)

    @cached_property
    def given(self) -> frozenset[str]:
        """Those of COLUMNS that certainly belong to something else than messages."""
        names = {name for source in self.sources for name in source.names}
        names |= {
            alias
            for item in self.select["select_list"]
            if (alias := item.get("alias", "").lower()) in COLUMNS
            and not any(ref["column_names"][0].lower() == alias for ref in refs_in(item))
        }
        return frozenset(names & COLUMNS.keys())

    @cached_property
    def uses(self) -> "list[Use]":
        """The uses of messages in its FROM."""
        return [source for source in self.sources if isinstance(source, Use)]

    @cached_property
    def by_alias(self) -> "dict[str, Source]":
        """The sources by their aliases."""
        return {source.alias: source for source in reversed(self.sources)}


class Uses:
    """The uses of messages in a query, and the columns that it names of each."""

    def __init__(self, tree: Node, views: Mapping[str, frozenset[str]]) -> None:
        self._views = views
        self.uses: list[Use] = []
        self._used: set[int] = set()
        #: Size of the tree.
        self.nodes = 0
        #: True if the query may read rows of messages in another way, such as a pivot.
        self.has_others = False
        self.scopes: list[Scope] = []
        #: Column references, each with its scope; and columns ``body`` that are cast.
        self.refs: list[tuple[Scope | None, Node]] = []
        self.casts: list[Node] = []
        self._walk(tree["statements"], None, withs=[])
        for scope, ref in self.refs:
            _resolve(scope, [name.lower() for name in ref["column_names"]])
        for scope in self.scopes:
            for name in (name for join in scope.joins for name in join["using_columns"]):
                if name.lower() in COLUMNS:
                    _mark(scope, name.lower())
        named_ones = {name for use in self.uses for name in use.columns}
        self.columns = tuple(name for name in COLUMNS if name in named_ones)

    def _walk(
        self, node: Any, scope: Scope | None, *, withs: list[Node], in_from: bool = False
    ) -> None:
        if isinstance(node, list):
            for each in node:
                self._walk(each, scope, withs=withs, in_from=in_from)
            return
        if not isinstance(node, dict):
            return
        self.nodes += 1
        kind = node.get("type")
        if isinstance(kind, str) and kind in _NODES and "cte_map" in node:
            self._walk_query(node, scope, withs=withs, in_from=in_from)
            return
        if kind == "BASE_TABLE" and node["table_name"].lower() == VIEW:
            self.has_others = self.has_others or id(node) not in self._used
        if node.get("class") == "COLUMN_REF":
            self.refs.append((scope, node))
        elif node.get("class") == "CAST" and _is_body_as_text(node):
            self.casts.append(node["child"])
        elif node.get("class") == "STAR" and scope is not None:
            scope.stars.append(node)
        for each in node.values():
            self._walk(each, scope, withs=withs, in_from=in_from)

    def _walk_query(
        self, node: Node, parent: Scope | None, *, withs: list[Node], in_from: bool
    ) -> None:
        own = node["cte_map"]["map"]
        withs = [*withs, *own]
        for entry in own:
            self._walk(entry["value"]["query_node"], parent, withs=withs)
        rest = {key: each for key, each in node.items() if key != "cte_map"}
        if node["type"] != "SELECT_NODE":
            self._walk(list(rest.values()), parent, withs=withs, in_from=in_from)
            return
        scope = Scope(node, parent, withs, in_from)
        self.scopes.append(scope)
        self._add_sources(node["from_table"], scope)
        for key, each in rest.items():
            self._walk(each, scope, withs=withs, in_from=key == "from_table")
        # ORDER BY ALL is a star over the SELECT list.
        orders = [each for modifier in node["modifiers"] for each in modifier.get("orders") or ()]
        of_all = {id(each["expression"]) for each in orders}
        scope.stars = [
            star
            for star in scope.stars
            if id(star) not in of_all or star["expr"] or star["relation_name"]
        ]

    def _add_sources(self, table: Node, scope: Scope) -> None:
        if table["type"] == "JOIN":
            scope.joins.append(table)
            self._add_sources(table["left"], scope)
            self._add_sources(table["right"], scope)
            return
        name = table.get("table_name", "")
        alias = (table.get("alias") or name).lower()
        renamed = frozenset(each.lower() for each in table.get("column_name_alias") or ())
        names: frozenset[str] = frozenset()
        if table["type"] == "SUBQUERY":
            names = _outputs(table["subquery"]["node"])
        elif table["type"] == "BASE_TABLE":
            entry = with_entry(table, scope.withs)
            if entry is not None:
                names = _outputs(entry["value"]["query_node"])
                names |= {each.lower() for each in entry["value"]["aliases"]}
            elif name.lower() == VIEW and not renamed:
                use = Use(alias, frozenset(), table, scope)
                self.uses.append(use)
                self._used.add(id(table))
                scope.sources.append(use)
                return
            else:
                names = self._views.get(name.lower(), frozenset())
        scope.sources.append(Source(alias, names | renamed))


def _resolve(scope: Scope | None, names: list[str]) -> None:
    """Mark the uses of messages that a column reference may name a column of."""
    for at, name in enumerate(names[:3]):
        if name not in COLUMNS:
            continue
        if at:
            use = use_named(scope, names[at - 1])
            if use is not None:
                use.columns.add(name)
            continue
        inner = scope
        while inner and name not in inner.given and not _mark(inner, name):
            inner = inner.parent


def _mark(scope: Scope, name: str) -> bool:
    """Mark the scope's uses of messages; return True if there are any."""
    for use in scope.uses:
        use.columns.add(name)
    return bool(scope.uses)


def use_named(scope: Scope | None, qualifier: str) -> Use | None:
    """Return the use of messages with this alias, unless the alias is another source's."""
    while scope is not None:
        source = scope.by_alias.get(qualifier)
        if source is not None:
            return source if isinstance(source, Use) else None
        scope = scope.parent
    return None


def with_entry(table: Node, withs: list[Node]) -> Node | None:
    """Return the WITH entry that a table names; None if it names a view."""
    if table.get("schema_name") or table.get("catalog_name"):
        return None
    name = table["table_name"].lower()
    return next((each for each in reversed(withs) if each["key"].lower() == name), None)


def _outputs(node: Node) -> frozenset[str]:
    """Return the columns that a query surely has, without those of its stars."""
    while node["type"] != "SELECT_NODE":
        inner = node.get("left") or next(iter(node.get("children") or ()), None)
        if inner is None:
            return frozenset()
        node = inner
    found = (item.get("alias") or _last_name(item) for item in node["select_list"])
    return frozenset(name.lower() for name in found if name)


def _last_name(item: Node) -> str:
    return str(item["column_names"][-1]) if item.get("class") == "COLUMN_REF" else ""


def _is_body_as_text(cast: Node) -> bool:
    of_type = str((cast.get("type_expr") or {}).get("type_name", ""))
    return _last_name(cast["child"]).lower() == _BODY and of_type.lower() in _TEXT_TYPES


def refs_in(node: Any) -> Iterator[Node]:
    """Yield the column references in a tree."""
    return nodes_in(node, lambda each: each.get("class") == "COLUMN_REF")


def nodes_in(node: Any, is_wanted: Callable[[Node], bool]) -> Iterator[Node]:
    """Yield the nodes of a tree that are wanted, in no certain order."""
    left = [node]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            if is_wanted(each):
                yield each
            left += each.values()
