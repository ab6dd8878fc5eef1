"""Queries that tell which messages a use of the view ``messages`` can need.

Their result may be too large: that costs time. A body that is not in it is null, so it must never
be too small.
"""

from collections.abc import Iterator
from typing import Any, Final

from rmq_pipeline.store.query.body_uses import (
    COLUMNS,
    Node,
    Scope,
    Use,
    nodes_in,
    refs_in,
    with_entry,
)
from rmq_pipeline.store.query.interruptible import is_repeatable, is_scalar

#: Columns that name a message in the copied rows, and those of store.placed_messages.
PLACE: Final = ("topic", "queue_id", "queue_offset")
PLACED: Final = (*PLACE, "topic_id", "message_id", "position", "row")
_DISTINCT: Final[Node] = {"type": "DISTINCT_MODIFIER", "distinct_on_targets": []}


def place_queries(use: Use, *, columns: frozenset[str], is_complete: bool) -> Iterator[Node]:
    """Yield queries of the places that a use needs, the most selective one first.

    DuckDB may refuse some of them, such as those of a subquery that names columns of the outer
    query. The last one is accepted.

    Args:
        use: the use.
        columns: columns of messages that DuckDB has.
        is_complete: see BodyQuery.
    """
    scope, select = use.scope, use.scope.select
    alone = not scope.joins
    known = _known(scope, columns, or_now=is_complete)
    if _is_known(select["from_table"], or_now=is_complete):
        whole = len(known) == len(list(_conjuncts(select["where_clause"])))
        if is_complete and whole and (limited := _limited(select, alone=alone)):
            yield _query(use, select["from_table"], where=known, modifiers=limited)
        yield _query(use, select["from_table"], where=known)
        parent = scope.parent
        if parent is not None and not scope.is_source:
            outer = parent.select["from_table"]
            if outer["type"] != "EMPTY" and _is_known(outer, or_now=is_complete):
                both = [*known, *_known(parent, columns, or_now=is_complete)]
                yield _query(use, _crossed(outer, select["from_table"]), where=both)
    plain = (
        each
        for each in _conjuncts(select["where_clause"])
        if _is_plain(each, use, columns=columns, alone=alone)
    )
    yield _query(use, use.node, where=list(plain))


def _known(scope: Scope, columns: frozenset[str], *, or_now: bool) -> list[Node]:
    """Return the conditions of a WHERE that mean the same in the broker and in the process."""
    aliases = {item.get("alias", "").lower() for item in scope.select["select_list"]} - columns
    return [
        each
        for each in _conjuncts(scope.select["where_clause"])
        if _is_known(each, or_now=or_now)
        and not any(ref["column_names"][0].lower() in aliases for ref in refs_in(each))
    ]


def _conjuncts(where: Node | None) -> Iterator[Node]:
    if where is None:
        return
    if where["type"] == "CONJUNCTION_AND":
        for each in where["children"]:
            yield from _conjuncts(each)
    else:
        yield where


def _is_known(tree: Node, *, or_now: bool) -> bool:
    """Return True if a part of a query means the same in the broker and in the process."""
    names_one = any(
        name.lower() in COLUMNS for ref in refs_in(tree) for name in ref["column_names"]
    )
    return not names_one and is_repeatable(tree, or_now=or_now)


def _is_plain(node: Node, use: Use, *, columns: frozenset[str], alone: bool) -> bool:
    """Return True for a comparison of the use's columns with constants.

    It is not true where the columns are null, as they are in a row that an outer join has added.
    """
    if node["type"] in {"CONJUNCTION_AND", "CONJUNCTION_OR"}:
        return all(_is_plain(each, use, columns=columns, alone=alone) for each in node["children"])
    if node["class"] == "COMPARISON" and "DISTINCT" not in node["type"]:
        sides = [node["left"], node["right"]]
    elif node["class"] == "BETWEEN":
        sides = [node["input"], node["lower"], node["upper"]]
    elif node["type"] == "COMPARE_IN":
        sides = list(node["children"])
        if sides[0].get("class") != "COLUMN_REF":
            return False
    else:
        return False
    refs = [each for each in sides if each.get("class") == "COLUMN_REF"]
    if len(refs) != 1 or (node["class"] == "BETWEEN" and refs[0] is not node["input"]):
        return False
    constants = all(each.get("class") in {"COLUMN_REF", "CONSTANT"} for each in sides)
    names = [name.lower() for name in refs[0]["column_names"]]
    qualified = len(names) == 2 and names[0] == use.alias
    return constants and names[-1] in columns and (qualified or (alone and len(names) == 1))


def _limited(select: Node, *, alone: bool) -> list[Node]:
    """Return ORDER BY and LIMIT of a SELECT whose first rows need the first rows of its FROM.

    The order must mean the same in a query with another SELECT list.
    """
    items, modifiers = select["select_list"], select["modifiers"]
    kinds = [each["type"] for each in modifiers]
    plain = not (select["group_expressions"] or select["group_sets"])
    plain = plain and select["aggregate_handling"] == "STANDARD_HANDLING"
    plain = plain and not (select["having"] or select["qualify"] or select.get("sample"))
    plain = plain and modifiers[-1:] != [] and modifiers[-1].get("limit_type") == "ROW_COUNT"
    if not plain or kinds not in (["LIMIT_MODIFIER"], ["ORDER_MODIFIER", "LIMIT_MODIFIER"]):
        return []
    limit, offset = (_number(modifiers[-1].get(key)) for key in ("limit", "offset"))
    if limit is None or offset is None or not all(map(is_scalar, items)):
        return []
    orders = modifiers[0]["orders"] if len(modifiers) > 1 else []
    aliases = {item.get("alias", "").lower() for item in items}
    if any(item.get("replace_list") or item.get("rename_list") for item in items):
        return []
    for order in orders:
        refs = [ref["column_names"] for ref in refs_in(order)]
        names = {each[-1].lower() for each in refs}
        # A number is the place of a column in the SELECT, and a name may be that of a column there.
        if not names or names & aliases or not _is_known(order, or_now=True):
            return []
        if not alone and any(len(each) < 2 for each in refs):
            return []
    literal = {"kind": "INTEGER", "text": str(limit + offset)}
    last = {**modifiers[-1], "offset": None}
    last["limit"] = {**last["limit"], "literal": literal}
    return [*modifiers[:-1], last]


def _number(node: Node | None) -> int | None:
    """Return a constant number; 0 if there is none, None if it is something else."""
    if node is None:
        return 0
    literal = node.get("literal") or {}
    is_number = literal.get("kind") == "INTEGER" and str(literal.get("text")).isdecimal()
    return int(literal["text"]) if is_number else None


def _query(
    use: Use, table: Node, *, where: list[Node], modifiers: list[Node] | None = None
) -> Node:
    """Return the tree of a query that selects PLACED of a use."""
    path = {"schema_name": "store", "table_name": "placed_messages", "catalog_name": ""}
    placed = {**use.node, **path, "alias": use.alias}
    placed["qualified_name"] = {"path": ["store", "placed_messages"]}
    condition = {"class": "CONJUNCTION", "type": "CONJUNCTION_AND", "alias": "", "children": where}
    tables = _swapped(table, use.node, by=placed)
    ref = {"class": "COLUMN_REF", "type": "COLUMN_REF", "alias": ""}
    # A join may have a message several times. The first rows of an order are few.
    once = [] if modifiers or table is use.node else [_DISTINCT]
    return {
        **use.scope.select,
        "modifiers": modifiers or once,
        "cte_map": {"map": _needed([tables, where], use.scope.withs)},
        "select_list": [{**ref, "column_names": [use.alias, name]} for name in PLACED],
        "from_table": tables,
        "where_clause": condition if len(where) > 1 else next(iter(where), None),
        "group_expressions": [],
        "group_sets": [],
        "having": None,
        "qualify": None,
        "sample": None,
    }


def _crossed(left: Node, right: Node) -> Node:
    """Return the cross join of two tables."""
    return {
        "type": "JOIN",
        "alias": "",
        "sample": None,
        "left": left,
        "right": right,
        "condition": None,
        "join_type": "INNER",
        "ref_type": "CROSS",
        "using_columns": [],
        "delim_flipped": False,
        "duplicate_eliminated_columns": [],
        "is_implicit": True,
    }


def _swapped(tree: Any, node: Node, *, by: Node) -> Any:
    """Return a copy of a tree with another node in place of this one."""
    if tree is node:
        return by
    if isinstance(tree, list):
        return [_swapped(each, node, by=by) for each in tree]
    if isinstance(tree, dict):
        return {key: _swapped(each, node, by=by) for key, each in tree.items()}
    return tree


def _needed(trees: Any, withs: list[Node]) -> list[Node]:
    """Return the WITH entries that the trees name, directly or in another entry."""
    chosen: list[Node] = []
    left = [trees]
    while left:
        for table in nodes_in(left.pop(), lambda each: each.get("type") == "BASE_TABLE"):
            entry = with_entry(table, withs)
            if entry is not None and not any(entry is each for each in chosen):
                chosen.append(entry)
                left.append(entry)
    return [each for each in withs if any(each is other for other in chosen)]
