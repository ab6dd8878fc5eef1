"""Tokenizer of SQL92 expressions, and the error that shows a position in one."""

import re
from typing import Final, NamedTuple

from rmq_pipeline.errors import FilterExpressionError

_LOGIC: Final = ("NOT", "AND", "OR", "TRUE", "FALSE", "NULL", "IS")
_PREDICATES: Final = ("BETWEEN", "IN", "CONTAINS", "STARTSWITH", "ENDSWITH")
KEYWORDS: Final = frozenset([*_LOGIC, *_PREDICATES])
#: Kind of the token after the last word of the expression.
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
CORRECT_IT: Final = "Correct the filter at the caret."
_NO_ARITHMETIC: Final = ("Filters have no arithmetic.", "Write the computed number.")
#: Reason and remedy for unreadable text, by how the text starts: unclosed literals and syntax of
#: other SQL dialects.
_UNREADABLE: Final = {
    "'": ("The string has no closing quote.", "Add the quote; write '' for a quote in a string."),
    "/*": ("The comment is not closed.", "Add */ at its end."),
    "!=": ("Filters have no operator !=.", "Write <>."),
    '"': ("Filters have no double quotes.", "Quote strings with ', and property names not at all."),
    "%": _NO_ARITHMETIC,
    "*": _NO_ARITHMETIC,
    "/": _NO_ARITHMETIC,
}
#: Characters that an error shows on each side of the position.
_AROUND: Final = 60


class Token(NamedTuple):
    """Token of an expression."""

    #: "decimal", "whole", "text", "word" or END. Keywords (in capitals) and operators are their
    #: own kind.
    kind: str
    text: str
    #: Offset of the first character in the expression.
    at: int


def tokens(expression: str) -> list[Token]:
    """Split an expression into tokens, without blanks and comments; the last token is END.

    Raises:
        FilterExpressionError: a character starts no token.
    """
    found = []
    at = 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            what, remedy = _unreadable(expression[at:])
            raise fault(expression, at, what=what, remedy=remedy)
        kind, text = str(match.lastgroup), match.group()
        if kind == "sign":
            kind = text
        elif kind == "word" and text.upper() in KEYWORDS:
            kind = text.upper()
        if kind != "blank":
            found.append(Token(kind, text, at))
        at = match.end()
    return [*found, Token(END, "", len(expression))]


def _unreadable(rest: str) -> tuple[str, str]:
    for start, texts in _UNREADABLE.items():
        if rest.startswith(start):
            return texts
    return f"The character {rest[0]!r} is not part of any word.", "Remove the character."


def fault(expression: str, at: int, *, what: str, remedy: str) -> FilterExpressionError:
    """Build the error that shows the line of the expression, the position and a reason.

    Args:
        expression: the whole filter.
        at: offset of the faulty character, from 0.
        what: the reason, a sentence.
        remedy: the correction, a sentence.
    """
    start = expression.rfind("\n", 0, at) + 1
    stop = expression.find("\n", at)
    line = expression[start : stop if stop >= 0 else len(expression)]
    first = max(0, at - start - _AROUND)
    shown = line[first : at - start + _AROUND].replace("\t", " ").replace("\r", " ")
    caret = " " * (at - start - first) + "^"
    return FilterExpressionError(
        f"The filter does not parse at character {at + 1}:\n  {shown}\n  {caret}\n{what}",
        remedy=remedy,
    )
