"""The SQL of the store: named statements and scripts from ``store/sql``.

A statement begins with a line ``-- name: …`` and the comments that say what goes in and what comes
out. ``$ACK`` and the like become the numbers of store/events.py; ``"{table}"`` and the like are for
``named`` to fill in.
"""

import re
from functools import cache
from importlib import resources
from typing import Final

from rmq_pipeline.store.events import Kind

#: Files that run as a whole.
_SCRIPTS: Final = frozenset({"schema", "views", "history"})
_NAME: Final = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


def script(name: str) -> str:
    """A file that runs as a whole: ``schema``, ``views`` or ``history``."""
    return _with_kinds((resources.files("rmq_pipeline.store") / "sql" / f"{name}.sql").read_text())


def named(name: str, **placeholders: str) -> str:
    """The statement of that name; its placeholders get these texts as they are.

    Raises:
        KeyError: there is none.
    """
    text = statements()[name]
    for placeholder, value in placeholders.items():
        text = text.replace(f'"{{{placeholder}}}"', value)
    return text


def quoted(identifier: str) -> str:
    """A name in double quotes, whatever it holds."""
    return '"' + identifier.replace('"', '""') + '"'


@cache
def statements() -> dict[str, str]:
    """Every named statement, its comment lines included."""
    found: dict[str, str] = {}
    for file in sorted(
        (resources.files("rmq_pipeline.store") / "sql").iterdir(), key=lambda file: file.name
    ):
        stem, _, ending = file.name.rpartition(".")
        if ending != "sql" or stem in _SCRIPTS:
            continue
        parts = _NAME.split(_with_kinds(file.read_text()))
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            if name in found:
                raise ValueError(f"Two statements have the name {name}.")
            found[name] = text.strip()
    return found


def _with_kinds(text: str) -> str:
    return re.sub(r"\$([A-Z][A-Z_]+)\b", lambda match: str(int(Kind[match[1]])), text)
