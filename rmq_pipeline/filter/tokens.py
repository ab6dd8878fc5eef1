"""A SQL92 expression cut into its words, and the error that points into it."""

import re
from typing import Final, NamedTuple

from rmq_pipeline.errors import FilterExpressionError

_LOGIC: Final = ("NOT", "AND", "OR", "TRUE", "FALSE", "NULL", "IS")
_PREDICATES: Final = ("BETWEEN", "IN", "CONTAINS", "STARTSWITH", "ENDSWITH")
KEYWORDS: Final = frozenset([*_LOGIC, *_PREDICATES])
#: Kind of the token behind the last one.
END: Final = "the end"

_TOKEN: Final = re.compile(
    r"""
      (?P<blank>[ \t\n\r\f]+ | --[^\r\n]* | /\*.*?\*/)
    | (?P<decimal>[0-9]+\.[0-9]*(?:e[+-]?[0-9]+)? | \.[0-9]+(?:e[+-]?[0-9]+)? | [0-9]+e[+-]?[0-9]+)
    | (?P<whole>[0-9]+l?)
    | (?P<text>'(?:[^']|'')*'(?!'))
    | (?P<word>[a-z_$][a-z0-9_$]*)
    | (?P<sign><>|<=|>=|[=<>(),+-])
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE | re.ASCII,
)
#: What other languages have here, and what is meant.
_MEANT: Final = {
    "'": "The quote that ends this text is missing.",
    "/*": "The comment is not ended.",
    "!=": "Not equal is <>.",
    '"': "A text is in single quotes; a property has none.",
    "%": "There is no arithmetic.",
    "*": "There is no arithmetic.",
    "/": "There is no arithmetic.",
}
#: Characters of the expression that an error shows on each side of its place.
_AROUND: Final = 60


class Token(NamedTuple):
    """A word of an expression."""

    #: decimal, whole, text, word, END; a keyword in capitals, or a sign, is its own kind.
    kind: str
    text: str
    #: Where it begins.
    at: int


def tokens(expression: str) -> list[Token]:
    """The words of an expression, without blanks and comments; the last one is END.

    Raises:
        FilterExpressionError: something is no word.
    """
    found = []
    at = 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            raise fault(expression, at, what=_unreadable(expression[at:]))
        kind, text = str(match.lastgroup), match.group()
        if kind == "sign":
            kind = text
        elif kind == "word" and text.upper() in KEYWORDS:
            kind = text.upper()
        if kind != "blank":
            found.append(Token(kind, text, at))
        at = match.end()
    return [*found, Token(END, "", len(expression))]


def _unreadable(rest: str) -> str:
    for start, meant in _MEANT.items():
        if rest.startswith(start):
            return meant
    return f"{rest[0]!r} has no meaning here."


def fault(expression: str, at: int, *, what: str) -> FilterExpressionError:
    """The error that shows the place in the expression, and says what is wrong there."""
    start = expression.rfind("\n", 0, at) + 1
    stop = expression.find("\n", at)
    line = expression[start : stop if stop >= 0 else len(expression)]
    first = max(0, at - start - _AROUND)
    shown = line[first : at - start + _AROUND].replace("\t", " ").replace("\r", " ")
    caret = " " * (at - start - first) + "^"
    return FilterExpressionError(
        f"The filter does not parse at character {at + 1}:\n  {shown}\n  {caret}\n{what}"
    )
