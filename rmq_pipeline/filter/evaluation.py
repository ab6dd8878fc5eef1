"""Evaluation of SQL92 conditions on whole columns, with three-valued logic.

A condition is true, false or unknown for each message. A string compared with a number is parsed
as a number. If it does not parse, the evaluation fails and the message does not match.
AND and OR evaluate from left to right and stop at the first operand that decides the result. An
operand after that one cannot fail.
"""

from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.filter import numerals
from rmq_pipeline.filter.columns import Columns
from rmq_pipeline.filter.numerals import Parsed
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

_COMPARE: Final = {
    ">": pc.greater,
    ">=": pc.greater_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    "=": pc.equal,
}
_HAS: Final = {
    "CONTAINS": pc.match_substring,
    "STARTSWITH": pc.starts_with,
    "ENDSWITH": pc.ends_with,
}


class Truth(NamedTuple):
    """Result of a condition, one row per message."""

    #: Null means unknown.
    value: pa.BooleanArray
    #: True where the evaluation failed; without nulls. None if no row failed.
    failed: pa.BooleanArray | None = None


def matches(condition: Condition, columns: Columns) -> pa.BooleanArray:
    """Return one boolean per message: True where the condition is true; no nulls."""
    truth = _truth(condition, columns)
    value = pc.fill_null(truth.value, False)
    return value if truth.failed is None else pc.and_not(value, truth.failed)


def _truth(condition: Condition, columns: Columns) -> Truth:
    match condition:
        case Always(value):
            return Truth(_all(value, len(columns)))
        case AllOf(conditions):
            return _in_turn(conditions, columns, stops_at=False)
        case AnyOf(conditions):
            return _in_turn(conditions, columns, stops_at=True)
        case Not(operand):
            value, failed = _truth(operand, columns)
            return Truth(pc.invert(value), failed)
        case Equal(left, right):
            return _equal(left, right, columns=columns)
        case Order(sign, left, right):
            return _compared(sign, left, right=right, columns=columns)
        case IsNull(operand):
            return _is_null(operand, columns)
        case In(name, members):
            texts = columns.texts(name.name)
            found = pc.is_in(texts, value_set=pa.array(members, texts.type))
            return Truth(_known_where(texts, found))
        case Match():
            return _match(condition, columns)


def _all(value: bool | None, n: int) -> pa.BooleanArray:
    return pa.nulls(n, pa.bool_()) if value is None else pa.repeat(pa.scalar(value), n)


def _known_where(texts: pa.Array, found: pa.BooleanArray) -> pa.BooleanArray:
    if not texts.null_count:
        return found
    return pc.if_else(pc.is_valid(texts), found, pa.scalar(None, pa.bool_()))


def _in_turn(conditions: tuple[Condition, ...], columns: Columns, *, stops_at: bool) -> Truth:
    """Evaluate operands from left to right; AND stops at false, OR at true.

    A failure counts only in rows where the earlier operands left the result open.
    """
    value, failed = _truth(conditions[0], columns)
    join = pc.or_kleene if stops_at else pc.and_kleene
    for condition in conditions[1:]:
        next_value, next_failed = _truth(condition, columns)
        if next_failed is not None:
            known = pc.fill_null(value if stops_at else pc.invert(value), False)
            next_failed = pc.and_not(next_failed, known)
            failed = next_failed if failed is None else pc.or_(failed, next_failed)
        value = join(value, next_value)
    return Truth(value, failed)


def _is_null(operand: Expression, columns: Columns) -> Truth:
    match operand:
        case Name(name):
            return Truth(pc.is_null(columns.texts(name)))
        case Literal():
            return Truth(_all(False, len(columns)))
        case _:
            value, failed = _truth(operand, columns)
            return Truth(pc.is_null(value), failed)


def _match(condition: Match, columns: Columns) -> Truth:
    if not condition.part:
        return Truth(_all(False, len(columns)))
    match condition.operand:
        case Name() | Literal(str()):
            texts = _texts(condition.operand, columns)
        case Literal():
            return Truth(_all(False, len(columns)))
        case _:
            return Truth(_all(False, len(columns)), _truth(condition.operand, columns).failed)
    found = _HAS[condition.how](texts, condition.part)
    return Truth(pc.fill_null(pc.invert(found) if condition.negated else found, False))


def _texts(operand: Name | Literal, columns: Columns) -> pa.StringArray:
    if isinstance(operand, Name):
        return columns.texts(operand.name)
    return pa.repeat(pa.scalar(operand.value, pa.string()), len(columns))


def _equal(left: Expression, right: Expression, *, columns: Columns) -> Truth:
    if isinstance(left, Name | Literal) and isinstance(right, Name | Literal):
        if _is_text(left) and _is_text(right):
            return Truth(_same(left, right, columns=columns))
        return _compared("=", left, right=right, columns=columns)
    one, other = _as_truth(left, columns), _as_truth(right, columns)
    return Truth(pc.equal(one.value, other.value), _either(one.failed, other.failed))


def _same(left: Name | Literal, right: Name | Literal, *, columns: Columns) -> pa.BooleanArray:
    if isinstance(right, Literal) and isinstance(left, Name):
        return pc.equal(columns.texts(left.name), pa.scalar(right.value))
    if isinstance(left, Literal) and isinstance(right, Name):
        return _same(right, left, columns=columns)
    return pc.equal(_texts(left, columns), _texts(right, columns))


def _as_truth(operand: Expression, columns: Columns) -> Truth:
    match operand:
        case Name(name):
            return Truth(*columns.booleans(name))
        case Literal():
            return Truth(*numerals.booleans(_texts(operand, columns)))
        case _:
            return _truth(operand, columns)


def _is_text(operand: Name | Literal) -> bool:
    return isinstance(operand, Name) or isinstance(operand.value, str)


def _compared(sign: str, left: Name | Literal, *, right: Name | Literal, columns: Columns) -> Truth:
    """Compare two operands as numbers.

    A string is parsed as the type of the literal on the other side. Two properties are compared
    as doubles.
    """
    compare = _COMPARE[sign]
    if not _is_text(left) and not _is_text(right):
        one, other = (pc.cast(_number(each), pa.float64(), safe=False) for each in (left, right))
        if _number(left).type == _number(right).type:
            one, other = _number(left), _number(right)
        return Truth(_all(compare(one, other).as_py(), len(columns)))
    if not _is_text(right):
        parsed = _read_as(right, left, columns=columns)
        return Truth(compare(parsed.values, _number(right)), parsed.failed)
    if not _is_text(left):
        parsed = _read_as(left, right, columns=columns)
        return Truth(compare(_number(left), parsed.values), parsed.failed)
    assert isinstance(left, Name)
    assert isinstance(right, Name)
    first, second = columns.decimals(left.name), columns.decimals(right.name)
    failed = _either(first.failed, second.failed)
    if failed is not None:
        # If either property is missing, the result is unknown and neither string is parsed.
        for name in (left.name, right.name):
            failed = pc.and_(failed, pc.is_valid(columns.texts(name)))
    return Truth(compare(first.values, second.values), failed)


def _number(literal: Name | Literal) -> Any:
    assert isinstance(literal, Literal)
    return pa.scalar(literal.value, pa.int64() if isinstance(literal.value, int) else pa.float64())


def _read_as(number: Name | Literal, texts: Name | Literal, *, columns: Columns) -> Parsed:
    """Parse strings as the type of the literal: integers or doubles."""
    assert isinstance(number, Literal)
    whole = isinstance(number.value, int)
    if isinstance(texts, Name):
        return columns.wholes(texts.name) if whole else columns.decimals(texts.name)
    column = _texts(texts, columns)
    return numerals.wholes(column) if whole else numerals.decimals(column)


def _either(one: pa.BooleanArray | None, other: pa.BooleanArray | None) -> pa.BooleanArray | None:
    if one is None or other is None:
        return other if one is None else one
    return pc.or_(one, other)
