"""Recursive-descent parser of SQL92 filters (semantics §10), with the type checks of operands."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rmq_pipeline import limits
from rmq_pipeline.errors import FilterExpressionError
from rmq_pipeline.filter.syntax import (
    AllOf,
    Always,
    AnyOf,
    Condition,
    Equal,
    Expression,
    In,
    IsNull,
    Literal,
    Match,
    Name,
    Not,
    Order,
)
from rmq_pipeline.filter.tokens import CORRECT_IT, END, Token, fault, tokens

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
