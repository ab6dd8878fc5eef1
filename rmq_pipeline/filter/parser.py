"""Syntax tree, tokens and recursive-descent parser of SQL92 filters (semantics §10)."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from rmq_pipeline import limits
from rmq_pipeline.errors import FilterExpressionError


@dataclass(frozen=True, slots=True)
class Name:
    """Property of a message: a string, or null if the message lacks it."""

    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Literal:
    """String or number; integers have 64 bits."""

    value: str | int | float
    at: int


@dataclass(frozen=True, slots=True)
class AllOf:
    """Conjunction (AND), evaluated from left to right until an operand is false."""

    conditions: "tuple[Condition, ...]"
    at: int


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Disjunction (OR), evaluated from left to right until an operand is true."""

    conditions: "tuple[Condition, ...]"
    at: int


@dataclass(frozen=True, slots=True)
class Not:
    """Negation; unknown where the operand is unknown."""

    condition: "Condition"
    at: int


@dataclass(frozen=True, slots=True)
class Equal:
    """Equality of two values or two conditions; unknown if either is null or unknown."""

    left: "Expression"
    right: "Expression"
    at: int


@dataclass(frozen=True, slots=True)
class Order:
    """Comparison of two numbers by order."""

    #: >, >=, <, <=
    sign: str
    left: Name | Literal
    right: Name | Literal
    at: int


@dataclass(frozen=True, slots=True)
class IsNull:
    """Test for a missing value or an unknown condition; the result is never unknown."""

    operand: "Expression"
    at: int


@dataclass(frozen=True, slots=True)
class In:
    """Test that a property equals one of the strings in ``members``."""

    name: Name
    members: tuple[str, ...]
    at: int


@dataclass(frozen=True, slots=True)
class Match:
    """Substring, prefix or suffix test of a string.

    False if the operand is not a string or is missing, also with ``negated``.
    """

    #: CONTAINS, STARTSWITH, ENDSWITH
    how: str
    operand: "Expression"
    part: str
    negated: bool
    at: int


@dataclass(frozen=True, slots=True)
class Always:
    """Constant condition: TRUE, FALSE or NULL (unknown)."""

    value: bool | None
    at: int


Condition: TypeAlias = AllOf | AnyOf | Not | Equal | Order | IsNull | In | Match | Always
Expression: TypeAlias = Name | Literal | Condition


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


WHOLE_MIN: Final = -(2**63)
WHOLE_MAX: Final = 2**63 - 1
_CONSTANTS: Final = {"TRUE": True, "FALSE": False, "NULL": None}


def parse(expression: str) -> Condition:
    """Parse a SQL92 expression.

    Raises:
        FilterExpressionError: the expression is too long, or it does not parse. A syntax error
            shows the position.
    """
    if len(expression) > limits.FILTER_LENGTH:
        raise FilterExpressionError(
            f"The filter has {len(expression):,} characters; {limits.FILTER_LENGTH:,} are allowed.",
            remedy="Shorten the filter; one IN replaces many comparisons of a property.",
        )
    return _Parser(expression).whole()


class _Parser:
    """Parser with one method per grammar rule; ``_token`` is the next unread token."""

    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._tokens = iter(tokens(expression))
        self._token = next(self._tokens)
        self._depth = 0
        #: Positions of NOT operators that are not in parentheses with their operand.
        self._negated: set[int] = set()

    def whole(self) -> Condition:
        """Parse the whole expression."""
        if self._token.kind == END:
            raise FilterExpressionError(
                "The SQL92 filter is empty; it needs at least one condition.",
                remedy="Add a condition, such as price > 10.",
            )
        found = self._any_of()
        if self._token.kind != END:
            raise self._unexpected("AND, OR or the end")
        return self._condition(found)

    # ------------------------------------------------------------------------------- the grammar

    def _any_of(self) -> Expression:
        first = self._all_of()
        if self._token.kind != "OR":
            return first
        conditions = [self._condition(first)]
        while self._taken("OR"):
            conditions.append(self._condition(self._all_of()))
        return AnyOf(tuple(conditions), first.at)

    def _all_of(self) -> Expression:
        first = self._equality()
        if self._token.kind != "AND":
            return first
        conditions = [self._condition(first)]
        while self._taken("AND"):
            conditions.append(self._condition(self._equality()))
        return AllOf(tuple(conditions), first.at)

    def _equality(self) -> Expression:
        with self._chain() as link:
            left = self._comparison()
            while sign := self._taken("=", "<>", "IS"):
                link(left)
                if sign.kind == "IS":
                    negated = self._taken("NOT") is not None
                    self._expect("NULL")
                    found: Condition = IsNull(left, left.at)
                else:
                    negated = sign.kind == "<>"
                    found = self._equal(left, self._comparison(), at=sign)
                left = Not(found, left.at) if negated else found
        return left

    def _comparison(self) -> Expression:
        with self._chain() as link:
            left = self._unary()
            while True:
                sign = self._token
                if self._taken(">", ">=", "<", "<="):
                    link(left)
                    left = self._order(sign, left, right=self._unary())
                    continue
                negated = self._taken("NOT") is not None
                if word := self._taken("BETWEEN", "IN", "CONTAINS", "STARTSWITH", "ENDSWITH"):
                    link(left)
                    left = self._predicate(word, left, negated=negated)
                elif negated:
                    raise self._unexpected("BETWEEN, IN, CONTAINS, STARTSWITH or ENDSWITH")
                else:
                    return left

    def _predicate(self, word: Token, left: Expression, *, negated: bool) -> Condition:
        if word.kind == "BETWEEN":
            return self._between(word, left, negated=negated)
        if word.kind == "IN":
            found = self._in(word, left)
            return Not(found, left.at) if negated else found
        return Match(word.kind, left, self._text(), negated, left.at)

    def _unary(self) -> Expression:
        at = self._token
        if not (sign := self._taken("+", "-", "NOT")):
            return self._primary()
        with self._deeper(at):
            operand = self._unary()
        if sign.kind == "NOT":
            self._negated.add(at.at)
            return Not(self._condition(operand), at.at)
        if sign.kind == "+":
            return operand
        if not isinstance(operand, Literal) or isinstance(operand.value, str):
            raise self._fault(at, "A sign can precede only a number.", remedy="Remove the sign.")
        return Literal(-operand.value, at.at)

    def _primary(self) -> Expression:
        token = self._token
        if self._taken("("):
            with self._deeper(token):
                found = self._any_of()
            self._expect(")")
            # Parentheses end the scope of NOT, so the wrapped Not passes the check in _chain.
            return AllOf((found,), token.at) if isinstance(found, Not) else found
        if self._taken("word"):
            return Name(token.text, token.at)
        if token.kind == "text":
            return Literal(self._text(), token.at)
        if self._taken("whole"):
            return Literal(int(token.text.rstrip("lL")), token.at)
        if self._taken("decimal"):
            if (number := float(token.text)) == float("inf"):
                raise self._fault(
                    token, "The number is too large.", remedy="Write a number below 1.8E308."
                )
            return Literal(number, token.at)
        if self._taken(*_CONSTANTS):
            return Always(_CONSTANTS[token.kind], token.at)
        raise self._unexpected("a property, a number, a text or a condition")

    def _text(self) -> str:
        token = self._token
        if not self._taken("text"):
            raise self._unexpected("a text in single quotes")
        return token.text[1:-1].replace("''", "'")

    # ------------------------------------------------------------------------------- type checks

    def _condition(self, found: Expression) -> Condition:
        """Return the operand as a condition; a bare property means "property = TRUE"."""
        if isinstance(found, Name):
            return Equal(found, Always(True, found.at), found.at)
        if isinstance(found, Literal):
            raise self._fault(
                found,
                "A value alone is not a condition.",
                remedy="Compare the value with a property.",
            )
        return found

    def _equal(self, left: Expression, right: Expression, *, at: Token) -> Condition:
        for one, other in ((left, right), (right, left)):
            if isinstance(one, Always) and one.value is None:
                raise self._fault(
                    one, "Nothing equals NULL.", remedy="Write IS NULL or IS NOT NULL."
                )
            self._check_range(one)
            if _is_number(one) and not isinstance(other, Name | Literal):
                raise self._fault(
                    at,
                    "A number cannot equal a condition.",
                    remedy="Compare the number with a property or a number.",
                )
        return Equal(left, right, left.at)

    def _order(self, sign: Token, left: Expression, *, right: Expression) -> Condition:
        return Order(sign.kind, self._orderable(left), self._orderable(right), left.at)

    def _orderable(self, operand: Expression) -> Name | Literal:
        if isinstance(operand, Name):
            return operand
        if isinstance(operand, Literal) and not isinstance(operand.value, str):
            self._check_range(operand)
            return operand
        raise self._fault(
            operand,
            "Only numbers and properties can be compared by order.",
            remedy="Compare with a number here; strings take = and <>.",
        )

    def _between(self, word: Token, left: Expression, *, negated: bool) -> Condition:
        value = self._orderable(left)
        low = self._orderable(self._unary())
        self._expect("AND")
        high = self._orderable(self._unary())
        if isinstance(low, Literal) and isinstance(high, Literal):
            # Both are numbers: other literals have no order.
            least, most = float(low.value), float(high.value)
            if least > most:
                raise self._fault(
                    word,
                    f"Nothing is between {low.value} and {high.value}.",
                    remedy="Write the lower limit first.",
                )
        if negated:
            parts = Order("<", value, low, left.at), Order(">", value, high, left.at)
            return AnyOf(parts, left.at)
        return AllOf((Order(">=", value, low, left.at), Order("<=", value, high, left.at)), left.at)

    def _in(self, word: Token, left: Expression) -> In:
        if not isinstance(left, Name):
            raise self._fault(
                word,
                "The left side of IN is not a property.",
                remedy="Write a property before IN.",
            )
        self._expect("(")
        members = [self._text()]
        while self._taken(","):
            members.append(self._text())
        self._expect(")")
        return In(left, tuple(dict.fromkeys(members)), left.at)

    def _check_range(self, operand: Expression) -> None:
        value = operand.value if isinstance(operand, Literal) else None
        if isinstance(value, int) and not WHOLE_MIN <= value <= WHOLE_MAX:
            raise self._fault(
                operand,
                "The integer does not fit into 64 bits.",
                remedy="Write the number with a decimal point, or a smaller one.",
            )

    # ------------------------------------------------------------------------- reading of tokens

    def _taken(self, *kinds: str) -> Token | None:
        """Consume and return the next token if it is of one of the kinds, else return None."""
        token = self._token
        if token.kind not in kinds:
            return None
        self._token = next(self._tokens)
        return token

    def _expect(self, kind: str) -> None:
        if not self._taken(kind):
            raise self._unexpected(kind)

    def _unexpected(self, expected: str) -> FilterExpressionError:
        found = self._token.text or END
        return self._fault(self._token, f"Found {found}, expected {expected}.")

    def _fault(
        self, at: Token | Expression, what: str, *, remedy: str = CORRECT_IT
    ) -> FilterExpressionError:
        return fault(self._expression, at.at, what=what, remedy=remedy)

    def _too_deep(self, at: Token | Expression) -> FilterExpressionError:
        return self._fault(
            at,
            f"The expression is nested deeper than {limits.FILTER_DEPTH} levels.",
            remedy="Use fewer parentheses, NOTs and chained comparisons.",
        )

    @contextmanager
    def _deeper(self, at: Token) -> Iterator[None]:
        """Enter one level of nesting; the error of a nesting too deep points to ``at``."""
        self._depth += 1
        if self._depth > limits.FILTER_DEPTH:
            raise self._too_deep(at)
        yield
        self._depth -= 1

    @contextmanager
    def _chain(self) -> Iterator[Callable[[Expression], None]]:
        """Check a chain of operators such as ``a = b = c``.

        Yields a function that the caller calls with the left operand of each operator. Each
        operator counts as one level of nesting.
        """
        depth = self._depth

        def link(left: Expression) -> None:
            self._depth += 1
            if self._depth > limits.FILTER_DEPTH:
                raise self._too_deep(left)
            if isinstance(left, Not) and left.at in self._negated:
                raise self._fault(
                    left,
                    "NOT applies only to the next word.",
                    remedy="Put the negated condition in parentheses: NOT (a = 1).",
                )

        yield link
        self._depth = depth


def _is_number(operand: Expression) -> bool:
    return isinstance(operand, Literal) and not isinstance(operand.value, str)
