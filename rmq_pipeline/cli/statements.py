"""SQL statements of commands, with literal values."""

import re
from typing import Final

from rmq_pipeline.store.statements import named

_COMMENT: Final = re.compile(r"^--.*\n", re.MULTILINE)
_PARAMETER: Final = re.compile(r"\$([a-z_]+)")


def statement(name: str, **values: str | int | None) -> str:
    """Return a named statement of store/sql/command_line.sql with values in place of parameters.

    The sql verb takes only text, so values become literals.
    """
    text = _COMMENT.sub("", named(name)).rstrip().removesuffix(";")
    return _PARAMETER.sub(lambda found: literal(values[found[1]]), text)


def literal(value: str | int | None) -> str:
    """Return a value as a SQL literal; a doubled quote is the only escape in a string."""
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return str(value)
    return "'" + value.replace("'", "''") + "'"
