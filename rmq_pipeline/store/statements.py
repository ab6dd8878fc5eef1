"""The SQL of the store: named statements and scripts from ``store/sql``.

A statement begins with a line ``-- name: …``, then comments on its parameters and its result.
``$ACK``, ``$PARKED`` and similar names are replaced by the numbers of store/events.py. ``named``
replaces ``"{table}"`` and similar placeholders.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from types import MappingProxyType
from typing import Final

from rmq_pipeline.store.events import Delivery, Kind

#: Files that run as a whole.
_SCRIPTS: Final = ("schema", "views", "history", "delivery_views")
#: Ending of statements for PostgreSQL, which DuckDB does not parse.
_POSTGRES: Final = "pgsql"
_SQL: Final = resources.files("rmq_pipeline.store") / "sql"
_NUMBERS: Final = {each.name: int(each) for each in (*Kind, *Delivery)}
_NAME: Final = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_PLACEHOLDER: Final = re.compile(r'"\{(\w+)\}"')
_COMMENT: Final = re.compile(r"^--.*\n", re.MULTILINE)
_PARAMETER: Final = re.compile(r"\$([a-z_]+)")
_VIEW_MACRO: Final = re.compile(
    r"^CREATE OR REPLACE MACRO main\.(\w+)\((\w+)\) AS TABLE$", re.MULTILINE
)


@cache
def tables() -> str:
    """Return the script that creates the tables."""
    return "\n".join((script("schema"), *_beginning("create_")))


@cache
def views() -> str:
    """Return the script that creates the views and macros over the tables."""
    moments = _beginning("at_")
    return "\n".join((script("history"), *moments, script("delivery_views"), script("views")))


def _beginning(prefix: str) -> Iterator[str]:
    return (text for name, text in _of_state_tables().items() if name.startswith(prefix))


def script(name: str) -> str:
    """Return a file that runs as a whole."""
    return _with_numbers((_SQL / f"{name}.sql").read_text())


def named(name: str, **placeholders: str) -> str:
    """Return a named statement; each placeholder is replaced by its text, unquoted.

    A replacement is not searched for placeholders. Comment lines are left alone, because a text
    could end the comment.

    Raises:
        KeyError: no statement has that name.
    """
    text = statements()[name]
    if not placeholders:
        return text
    return "\n".join(
        line
        if line.startswith("--")
        else _PLACEHOLDER.sub(lambda found: placeholders.get(found[1], found[0]), line)
        for line in text.split("\n")
    )


def select(name: str, *, views: Mapping[str, str] | None = None, **values: str | int | None) -> str:
    """Return a named SELECT for the verb ``sql``, with values in place of its parameters.

    The verb takes only text, so values become literals.

    Args:
        name: the statement.
        views: replacements of its placeholders.
        values: by parameter.
    """
    text = _COMMENT.sub("", named(name, **(views or {}))).rstrip().removesuffix(";")
    return _PARAMETER.sub(lambda found: literal(values[found[1]]), text)


def literal(value: str | int | None) -> str:
    """Return a value as a SQL literal; a doubled quote is the only escape in a string."""
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return str(value)
    return "'" + value.replace("'", "''") + "'"


def quoted(identifier: str) -> str:
    """Quote an identifier."""
    return '"' + identifier.replace('"', '""') + '"'


@cache
def view_macros() -> Mapping[str, str]:
    """Return the macros that a query may read like views, each with its parameter.

    They are parsed from the scripts, because DuckDB takes 30 ms to list its functions.
    """
    return MappingProxyType(dict(_VIEW_MACRO.findall(views())))


@cache
def statements() -> dict[str, str]:
    """Return all named statements, with their comment lines."""
    others = _named_in(_SQL, without=_SCRIPTS)
    if both := others.keys() & _of_state_tables().keys():
        raise ValueError(f"Two statements have the same name: {', '.join(sorted(both))}.")
    return {**others, **_of_state_tables()}


@cache
def of_postgres() -> dict[str, str]:
    """Return the named statements of a commit log in PostgreSQL."""
    return _named_in(_SQL / "postgres", without=("schema",), ending=_POSTGRES)


def postgres_schema() -> str:
    """Return the script that creates the tables of a commit log in PostgreSQL."""
    return (_SQL / "postgres" / f"schema.{_POSTGRES}").read_text()


@cache
def _of_state_tables() -> dict[str, str]:
    return _named_in(_SQL / "tables")


def _named_in(
    folder: Traversable, *, without: Sequence[str] = (), ending: str = "sql"
) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        stem, _, of_file = file.name.rpartition(".")
        if of_file != ending or stem in without:
            continue
        parts = _NAME.split(_with_numbers(file.read_text()))
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            if name in found:
                raise ValueError(f"Two statements have the name {name}.")
            found[name] = text.strip()
    return found


def _with_numbers(text: str) -> str:
    return re.sub(r"\$([A-Z][A-Z_]+)\b", lambda match: str(_NUMBERS[match[1]]), text)
