"""SQL that commands ask of the broker, with values in their places."""

import re
from typing import Final

from rmq_pipeline.store.statements import named

_COMMENT: Final = re.compile(r"^--.*\n", re.MULTILINE)
_PARAMETER: Final = re.compile(r"\$([a-z_]+)")


def statement(name: str, **values: str | int | None) -> str:
    """The statement of that name in store/sql/command_line.sql, as the door takes it.

    The door takes a query's text alone, so values become literals; a text in single quotes has no
    other escape than the doubled quote.
    """
    text = _COMMENT.sub("", named(name)).rstrip().removesuffix(";")
    return _PARAMETER.sub(lambda found: literal(values[found[1]]), text)


def literal(value: str | int | None) -> str:
    """A value as SQL writes it."""
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return str(value)
    return "'" + value.replace("'", "''") + "'"
