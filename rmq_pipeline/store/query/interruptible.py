"""Classifies queries: can DuckDB be relied on to stop them when it is interrupted?

DuckDB checks for an interruption between two vectors of rows, not inside a function. levenshtein of
two texts of 200,000 characters runs for a minute. replace('aaa…', 'a', 'bbb…') creates gigabytes. A
plan that doubles at every WITH never finishes. This module therefore lists the functions known to
run in linear time with a result no larger than their input. It bounds whatever can multiply.
"""

import json
import re
from typing import Any, Final

import duckdb

from rmq_pipeline.store.statements import named, view_macros

#: Longer queries count as uninterruptible, and so do queries with longer constants.
_QUERY_CHARACTERS: Final = 262_144
_CONSTANT_CHARACTERS: Final = 4_096
#: Each level of ``SELECT *, *`` doubles the columns of a plan. Each WITH that is used twice doubles
#: the plan itself.
_STARS: Final = 8
_TABLES: Final = 64
_CALLS: Final = 500
_NODES: Final = 20_000
_GROUPING_SETS: Final = 64


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OPERATORS: Final = _words("+ - * / // % & | << >> ~ @ ^ ** || ->>")
#: Safe if the second argument is a constant.
_BY_CONSTANT: Final = _words(
    "~~ !~~ ~~* !~~* ->> contains starts_with prefix ends_with suffix "
    "json_extract json_extract_string strftime strptime try_strptime position strpos instr"
)
_NUMBERS: Final = _words(
    "abs ceil ceiling floor round trunc sign sqrt ln log log2 log10 exp power pow mod divide "
    "greatest least hash isnan isfinite isinf"
)
_TEXTS: Final = _words(
    "length len strlen substr substring left right lower upper lcase ucase trim ltrim rtrim "
    "if reverse md5 ascii list_contains array_contains list_has array_has list_count array_length "
    "cardinality coalesce ifnull nullif concat map_extract element_at map_keys map_values "
    "struct_extract list_extract list_element array_extract struct_pack row list_value "
    "json_array_length json_valid"
)
_TIMES: Final = _words(
    "now today current_date current_timestamp get_current_timestamp transaction_timestamp "
    "date_trunc datetrunc date_part datepart date_diff datediff date_sub datesub date_add "
    "epoch epoch_ms epoch_us epoch_ns make_timestamp make_timestamp_ms make_timestamptz make_date "
    "make_time to_timestamp age year month day hour minute second millisecond microsecond week "
    "dayofweek dayofyear quarter dayname monthname last_day time_bucket timezone to_years "
    "to_months to_weeks to_days to_hours to_minutes to_seconds to_milliseconds "
    "to_microseconds"
)
_AGGREGATES: Final = _words(
    "count count_star count_if countif sum avg mean min max any_value first last arg_min arg_max "
    "min_by max_by argmin argmax bool_and bool_or median mode quantile quantile_cont quantile_disc "
    "approx_count_distinct approx_quantile stddev stddev_pop stddev_samp variance var_pop var_samp "
    "list array_agg string_agg group_concat listagg"
)
_SCALARS: Final = _OPERATORS | _BY_CONSTANT | _NUMBERS | _TEXTS | _TIMES | {"decode"}
_TABLE_FUNCTIONS: Final = frozenset({"unnest", "generate_series", "range"})
_ALWAYS: Final = _OPERATORS - _BY_CONSTANT | _NUMBERS | _TEXTS | _TIMES | _AGGREGATES | {"unnest"}
#: Other window functions compute each frame from its first row on.
_WINDOWS: Final = _words(
    "row_number rank dense_rank percent_rank cume_dist ntile lag lead first_value last_value "
    "nth_value first last sum count count_star min max avg"
)
#: Some functions take time quadratic in the digits of other types, such as BIGNUM.
_TYPES: Final = _words(
    "boolean bool tinyint smallint integer int int4 bigint int8 hugeint long utinyint usmallint "
    "uinteger ubigint float real double decimal numeric varchar text string date time timestamp "
    "timestamp_s timestamp_ms timestamp_us timestamp_ns datetime timestamptz interval json uuid "
    "list"
) | {"timestamp with time zone"}
_CLASSES: Final = _words(
    "BETWEEN CASE CAST COLUMN_REF COMPARISON CONJUNCTION CONSTANT FUNCTION LAMBDA OPERATOR "
    "POSITIONAL_REFERENCE STAR SUBQUERY TYPE WINDOW"
)
#: Node types of a query that are not expressions.
_PARTS: Final = _words(
    "SELECT_NODE SET_OPERATION_NODE RECURSIVE_CTE_NODE CTE_NODE BASE_TABLE SUBQUERY JOIN "
    "TABLE_FUNCTION EMPTY EXPRESSION_LIST ORDER_MODIFIER LIMIT_MODIFIER DISTINCT_MODIFIER "
    "LIMIT_PERCENT_MODIFIER ORDER_DEFAULT ASCENDING DESCENDING"
)
_PATH: Final = re.compile(r"[\w.$\[\]\"/-]*")
#: Functions whose result also depends on the time, or on the order of the rows.
_NOW: Final = _words(
    "now today current_date current_timestamp get_current_timestamp transaction_timestamp age"
)
_BY_ORDER: Final = _words(
    "any_value first last arg_min arg_max min_by max_by argmin argmax mode list array_agg "
    "string_agg group_concat listagg approx_count_distinct approx_quantile"
)
#: Parts of a query that choose among rows in no certain order.
_CHOOSING: Final = frozenset({"LIMIT_MODIFIER", "LIMIT_PERCENT_MODIFIER", "DISTINCT_MODIFIER"})


def is_interruptible(
    cursor: duckdb.DuckDBPyConnection, sql: str, *, macros: frozenset[str]
) -> bool:
    """Return True if DuckDB certainly stops this query within about a second of an interruption.

    Args:
        cursor: parses the query as the executing connection would.
        macros: the broker's own macros, which are interruptible.
    """
    if len(sql) > _QUERY_CHARACTERS:
        return False
    try:
        ((parsed,),) = cursor.execute(named("parsed_query"), {"sql": sql}).fetchall()
        return _Search(macros).holds(json.loads(parsed))
    except (duckdb.Error, RecursionError, ValueError):
        return False


def is_repeatable(tree: dict[str, Any], *, or_now: bool) -> bool:
    """Return True if a part of a query is interruptible, and means the same each time it is run.

    Args:
        tree: a part of a syntax tree, such as a condition.
        or_now: functions of the time are no matter.
    """
    varying = _BY_ORDER if or_now else _BY_ORDER | _NOW
    left: list[Any] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, dict):
            kind = node.get("type")
            if node.get("class") == "WINDOW" or (isinstance(kind, str) and kind in _CHOOSING):
                return False
            if _name(node) in varying:
                return False
            left += node.values()
    return _Search(frozenset(view_macros())).holds({"statements": [tree]})


def is_scalar(tree: dict[str, Any]) -> bool:
    """Return True if an item of a SELECT list certainly gives one value for each row."""
    left: list[Any] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, dict):
            if node.get("class") in {"WINDOW", "SUBQUERY"}:
                return False
            if node.get("class") == "FUNCTION" and _name(node) not in _SCALARS:
                return False
            left += node.values()
    return True


class _Search:
    """Walks the syntax tree of one query."""

    def __init__(self, macros: frozenset[str]) -> None:
        self._table_functions = _TABLE_FUNCTIONS | macros
        self._stars = self._tables = self._calls = self._nodes = 0

    def holds(self, tree: dict[str, Any]) -> bool:
        """Return True if every node of the tree is known to be interruptible."""
        if tree.get("error"):
            return False
        left: list[Any] = [tree["statements"]]
        while left:
            node = left.pop()
            if isinstance(node, list):
                left += node
            elif isinstance(node, dict):
                if not self._is_known(node):
                    return False
                left += self._within(node)
        return True

    def _within(self, node: dict[str, Any]) -> list[Any]:
        """Return the children of a node; a function in FROM was checked together with its node."""
        if node.get("type") == "TABLE_FUNCTION":
            others = [value for key, value in node.items() if key != "function"]
            return [*others, *node["function"].values()]
        return list(node.values())

    def _is_known(self, node: dict[str, Any]) -> bool:
        kind, expression = node.get("type"), node.get("class")
        self._nodes += 1
        self._stars += kind == "STAR"
        self._tables += kind in {"BASE_TABLE", "TABLE_FUNCTION"}
        self._calls += expression in {"FUNCTION", "WINDOW"}
        if self._nodes > _NODES or self._stars > _STARS:
            return False
        if self._tables > _TABLES or self._calls > _CALLS:
            return False
        if node.get("materialized") == "CTE_MATERIALIZE_NEVER" or node.get("sample"):
            return False
        if len(node.get("group_sets") or ()) > _GROUPING_SETS:
            return False
        if expression is None:
            return self._is_part(node, kind)
        return expression in _CLASSES and _EXPRESSIONS.get(expression, _any)(node)

    def _is_part(self, node: dict[str, Any], kind: object) -> bool:
        if kind == "TABLE_FUNCTION":
            return _name(node["function"]) in self._table_functions
        return not isinstance(kind, str) or kind in _PARTS


def _any(node: dict[str, Any]) -> bool:
    del node
    return True


def _constant(node: dict[str, Any]) -> bool:
    return len(json.dumps(node.get("literal", node.get("value")))) <= _CONSTANT_CHARACTERS


def _function(node: dict[str, Any]) -> bool:
    name = _name(node)
    if name in _BY_CONSTANT:
        return _second_is_constant(node, path="json" in name or name == "->>")
    return name in _ALWAYS


def _arrow(node: dict[str, Any]) -> bool:
    """Accept ``detail -> '$.topic'``, which DuckDB parses as a lambda."""
    right = node.get("expr") or {}
    return right.get("class") == "CONSTANT" and _is_path(right)


def _operator(node: dict[str, Any]) -> bool:
    return node.get("type") != "OPERATOR_TRY"


def _type(node: dict[str, Any]) -> bool:
    return str(node.get("type_name", "")).lower() in _TYPES


def _window(node: dict[str, Any]) -> bool:
    return _name(node) in _WINDOWS and not node.get("distinct")


def _second_is_constant(node: dict[str, Any], *, path: bool) -> bool:
    arguments = node.get("arguments") or []
    if len(arguments) != 2:
        return False
    second = arguments[1].get("expression") or {}
    return second.get("class") == "CONSTANT" and (not path or _is_path(second))


def _is_path(constant: dict[str, Any]) -> bool:
    """Return True for a JSON path without wildcards."""
    text = (constant.get("literal") or {}).get("text")
    return isinstance(text, str) and _PATH.fullmatch(text) is not None


def _name(function: dict[str, Any]) -> str:
    return str(function.get("function_name", "")).lower()


_EXPRESSIONS: Final = {
    "CONSTANT": _constant,
    "FUNCTION": _function,
    "LAMBDA": _arrow,
    "OPERATOR": _operator,
    "TYPE": _type,
    "WINDOW": _window,
}
