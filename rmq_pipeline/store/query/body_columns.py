"""Queries that name ``body`` or ``properties`` of the view ``messages``.

DuckDB does not have these columns. Such a query runs in a query process, which also gets the bodies
of the messages that the query can need. This module reads DuckDB's own syntax tree of a query. It
finds the uses of ``messages`` with these columns, and changes the text at these places:

* ``messages`` becomes a view of the process that has the columns.
* Stars exclude them: a body is read only where the query names it.
* A body that is cast is taken as UTF-8. DuckDB itself would escape each quote of a BLOB.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import duckdb

from rmq_pipeline.errors import QueryError
from rmq_pipeline.store.query.body_places import place_queries
from rmq_pipeline.store.query.body_uses import COLUMNS, VIEW, Node, Scope, Use, Uses, use_named
from rmq_pipeline.store.statements import named, quoted

#: Types of the columns in the process.
TYPES: Final = {"body": "BLOB", "properties": "MAP(VARCHAR, VARCHAR)"}
_SCHEMA: Final = "main"
#: Uses of messages with bodies in one query, and nodes of its tree: each use takes a walk of it.
_USES: Final = 8
_NODES: Final = 10_000
_UNKNOWN: Final = 2**64 - 1
_NAMED: Final = re.compile(rf"\b(?:{'|'.join(COLUMNS)})\b", re.IGNORECASE)
_TABLE: Final = re.compile(rb'(?:("?)main\1\s*\.\s*)?("?)messages\2', re.IGNORECASE)
_MAIN: Final = re.compile(rb'("?)main\1\s*\.\s*', re.IGNORECASE)
_STAR: Final = re.compile(rb'(?:(?:"[^"]*"|[\w$]+)\s*\.\s*)*\*')
_EXCLUDE: Final = re.compile(rb'\s*EXCLUDE\s*(?:(\()|("[^"]*"|[\w$]+))', re.IGNORECASE)
_TEXT: Final = re.compile(r'bodies\."?text"?\(((?:[^()"]|"[^"]*")*)\)')
_MESSAGES: Final = re.compile(rf"\bbodies\.(?={VIEW}\b)")
_MISSING: Final = re.compile(rf'(?:Referenced column|a column named) "(?:{"|".join(COLUMNS)})"')
WHO_HAS_THEM: Final = (
    "Only messages has the columns body and properties, without its stars; the state as of a moment"
    " does not. Name them in each subquery of messages, too."
)
_SIMPLER: Final = f"Name the columns of {VIEW}, or read them in a subquery of their own."


def may_name(sql: str) -> bool:
    """Return True if a query may name one of the columns; False is certain."""
    return VIEW in sql.lower() and _NAMED.search(sql) is not None


def original(text: str) -> str:
    """Return a column name or an error of the changed query as the query's own would be."""
    return _MESSAGES.sub("", _TEXT.sub(r"\1", text))


def is_missing(error: str) -> bool:
    """Return True if DuckDB says that there is no such column."""
    return _MISSING.search(error) is not None


@dataclass(frozen=True)
class BodyQuery:
    """A query that reads columns of messages which DuckDB does not have."""

    #: The text for the process.
    sql: str
    #: The named ones of COLUMNS.
    columns: tuple[str, ...]
    #: For each use of messages, queries of the places that it needs, each with the columns PLACED.
    #: The first one that DuckDB accepts and can interrupt is run.
    places: tuple[tuple[str, ...], ...]
    #: True if the query reads no message but those at the places.
    is_complete: bool


def body_query(
    cursor: duckdb.DuckDBPyConnection, sql: str, *, views: Mapping[str, Iterable[str]]
) -> BodyQuery | None:
    """Return what a query reads of the columns; None if it names none of them.

    Args:
        cursor: parses the query.
        sql: a checked query.
        views: the columns of each view.

    Raises:
        QueryError: the query names one in a way that is not supported.
    """
    try:
        return _body_query(cursor, sql, views=views)
    except RecursionError as error:
        raise QueryError("The query is nested too deeply.", remedy=_SIMPLER) from error


def _body_query(
    cursor: duckdb.DuckDBPyConnection, sql: str, *, views: Mapping[str, Iterable[str]]
) -> BodyQuery | None:
    tree = _parsed(cursor, sql)
    if tree is None:
        return None
    columns = {name.lower(): frozenset(map(str.lower, names)) for name, names in views.items()}
    reading = Uses(tree, columns)
    own = columns[VIEW]
    uses = [use for use in reading.uses if use.columns]
    if not uses:
        return None
    if len(uses) > _USES:
        raise QueryError(
            f"The query names bodies of {VIEW} in {len(uses)} places; the limit is {_USES}.",
            remedy="Read them once, in a WITH.",
        )
    if reading.nodes > _NODES:
        raise QueryError(
            "The query is too long for one that names bodies.",
            remedy="Select the messages in a query of their own, then name their places.",
        )
    changed = _Edits(reading, sql.encode()).applied()
    if _parsed(cursor, changed) is None:
        raise QueryError("The query names body in a way that is not supported.", remedy=_SIMPLER)
    is_complete = not reading.has_others and all(
        use.columns and use.is_joined_inner for use in reading.uses
    )
    places = tuple(
        tuple(
            _written(cursor, each)
            for each in place_queries(use, columns=own, is_complete=is_complete)
        )
        for use in uses
    )
    return BodyQuery(changed, reading.columns, places, is_complete)


def _parsed(cursor: duckdb.DuckDBPyConnection, sql: str) -> Node | None:
    """Return the syntax tree of a query; None if DuckDB has none for it."""
    try:
        ((text,),) = cursor.execute(named("parsed_query"), {"sql": sql}).fetchall()
        tree: Node = json.loads(text)
    except (duckdb.Error, RecursionError, ValueError):
        return None
    return None if tree.get("error") else tree


def _written(cursor: duckdb.DuckDBPyConnection, node: Node) -> str:
    """Return a SELECT as text; "" if DuckDB cannot write it."""
    tree = {"error": False, "statements": [{"node": node, "named_param_map": []}]}
    try:
        ((text,),) = cursor.execute(named("written_query"), {"tree": json.dumps(tree)}).fetchall()
    except (duckdb.Error, RecursionError):
        return ""
    return str(text)


class _Edits:
    """Changes to the text of a query; the rest of the text remains as it is."""

    def __init__(self, reading: Uses, text: bytes) -> None:
        self._reading = reading
        self._text = text
        self._edits: list[tuple[int, int, str]] = []

    def applied(self) -> str:
        """Return the changed text.

        Raises:
            QueryError: a part of the query would read bodies without naming them.
        """
        for scope in self._reading.scopes:
            uses = [each for each in scope.uses if each.columns]
            if uses:
                self._check(scope, uses)
                for use in uses:
                    self._replace(use.node, _TABLE, by=f"bodies.{VIEW}")
                for star in scope.stars:
                    self._shorten(star, uses)
        self._add_references()
        pieces: list[bytes] = []
        at = 0
        for start, stop, text in sorted(self._edits):
            pieces += [self._text[at:start], text.encode()]
            at = stop
        return b"".join([*pieces, self._text[at:]]).decode()

    def _add_references(self) -> None:
        for scope, ref in self._reading.refs:
            names = [name.lower() for name in ref["column_names"]]
            if len(names) > 2 and names[0] == _SCHEMA:
                use = use_named(scope, names[1])
                if use is not None and use.columns:
                    self._replace(ref, _MAIN, by="")
        for ref in self._reading.casts:
            start = self._place_of(ref)
            self._edits.append((start, start, "bodies.text("))
            end = start + ref["query_location_length"]
            self._edits.append((end, end, ")"))

    def _check(self, scope: Scope, uses: list[Use]) -> None:
        if any(join["ref_type"] == "NATURAL" for join in scope.joins):
            raise QueryError(
                f"NATURAL JOIN would compare the bodies of {VIEW}.",
                remedy="Name the columns: JOIN … USING (topic, queue_id, queue_offset).",
            )
        if any(use.node.get("sample") for use in uses) or scope.select.get("sample"):
            raise QueryError(
                "Bodies cannot be read of a sample.",
                remedy="Choose messages with WHERE or LIMIT.",
            )
        if any(star["columns"] for star in scope.stars):
            raise QueryError(
                f"COLUMNS(…) cannot be used in a SELECT that names a body of {VIEW}.",
                remedy=_SIMPLER,
            )

    def _replace(self, node: Node, pattern: re.Pattern[bytes], *, by: str) -> None:
        start = self._place_of(node)
        there = pattern.match(self._text, start)
        if there is None:
            raise QueryError(f"The query names {VIEW} in an unusual way.", remedy=_SIMPLER)
        self._edits.append((start, there.end(), by))

    def _shorten(self, star: Node, uses: list[Use]) -> None:
        """Exclude the columns from a star that has them."""
        relation = star["relation_name"].lower()
        named_ones = {str(each).lower() for each in star["exclude_list"]}
        named_ones |= {_key(each).lower() for each in star["replace_list"]}
        left_out = [
            f"{quoted(use.alias)}.{name}"
            for use in uses
            for name in self._reading.columns
            if relation in {"", use.alias} and name not in named_ones
        ]
        if not left_out:
            return
        names = ", ".join(left_out)
        start = self._place_of(star)
        there = _STAR.match(self._text, start)
        if there is None:
            raise QueryError(f"A star over {VIEW} is in an unusual place.", remedy=_SIMPLER)
        end = start + star["query_location_length"]
        exclude = _EXCLUDE.match(self._text, there.end(), end)
        if exclude is None:
            self._edits.append((there.end(), there.end(), f" EXCLUDE ({names})"))
        elif exclude[1]:
            self._edits.append((exclude.end(), exclude.end(), f"{names}, "))
        else:
            self._edits.append((exclude.start(2), exclude.start(2), f"({names}, "))
            self._edits.append((exclude.end(2), exclude.end(2), ")"))

    def _place_of(self, node: Node) -> int:
        start: int = node["query_location"]
        if start == _UNKNOWN:
            raise QueryError(
                "The query begins with FROM and names a body.", remedy="Write SELECT before FROM."
            )
        return start


def _key(entry: Any) -> str:
    return str(entry.get("key", "")) if isinstance(entry, dict) else str(entry)
