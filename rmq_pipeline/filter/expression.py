"""Filter expressions, compiled once and evaluated on tables of messages.

SQL92 conditions are evaluated on whole columns, with three-valued logic: a condition is true, false
or unknown for each message. A string compared with a number is parsed as a number. If it does not
parse, the evaluation fails and the message does not match. AND and OR evaluate from left to right
and stop at the first operand that decides the result. An operand after that one cannot fail.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.errors import FilterExpressionError
from rmq_pipeline.filter.parser import (
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
    parse,
)
from rmq_pipeline.message import Int64s, hash64

#: Numbers in SQL literal syntax, with an optional sign.
_WHOLE: Final = r"\A[+-]?[0-9]+\z"
_DECIMAL: Final = r"\A[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\z"
#: Every number of this many digits fits into 64 bits. The limits below have no sign.
_SAFE_DIGITS: Final = 18
_HIGHEST: Final = "9223372036854775807"
_LOWEST: Final = "9223372036854775808"


class Parsed(NamedTuple):
    """Values of a string column."""

    #: Null where the string is missing or does not parse.
    values: pa.Array
    #: True where a string did not parse; without nulls. None if all strings parsed.
    failed: pa.BooleanArray | None


def wholes(texts: pa.StringArray) -> Parsed:
    """Parse strings as signed 64-bit integers; a number beyond 64 bits fails."""
    good = pc.match_substring_regex(texts, _WHOLE)
    readable = _only(texts, good)
    try:
        return Parsed(pc.cast(readable, pa.int64()), _failed(good))
    except pa.ArrowInvalid:  # a plus sign, or more than 64 bits
        negative = pc.starts_with(readable, "-")
        digits = pc.ascii_ltrim(pc.ascii_ltrim(readable, "+-"), "0")
        digits = pc.if_else(pc.equal(pc.binary_length(digits), 0), "0", digits)
        limit = pc.if_else(negative, _LOWEST, _HIGHEST)
        length = pc.binary_length(digits)
        fits = pc.or_(
            pc.less_equal(length, _SAFE_DIGITS),
            pc.and_(pc.equal(length, len(_HIGHEST)), pc.less_equal(digits, limit)),
        )
        good = pc.and_(good, pc.fill_null(fits, False))
        signed = pc.if_else(negative, pc.binary_join_element_wise("-", digits, ""), digits)
        return Parsed(pc.cast(_only(signed, good), pa.int64()), _failed(good))


def decimals(texts: pa.StringArray) -> Parsed:
    """Parse strings as doubles; a number beyond their range becomes an infinity."""
    good = pc.match_substring_regex(texts, _DECIMAL)
    return Parsed(pc.cast(_only(texts, good), pa.float64()), _failed(good))


def booleans(texts: pa.StringArray) -> Parsed:
    """Parse "true" and "false" in any letter case."""
    lowered = pc.ascii_lower(texts)
    truths = pc.equal(lowered, "true")
    good = pc.or_(truths, pc.equal(lowered, "false"))
    return Parsed(_only(truths, good), _failed(good))


def _only(values: pa.Array, good: pa.BooleanArray) -> pa.Array:
    """Replace values with null where ``good`` is false or null."""
    if not good.null_count and good.true_count == len(good):
        return values
    return pc.if_else(good, values, pa.scalar(None, values.type))


def _failed(good: pa.BooleanArray) -> pa.BooleanArray | None:
    if good.true_count + good.null_count == len(good):
        return None
    return pc.invert(pc.fill_null(good, True))


#: RocketMQ's system properties that have a column of their own. The broker refuses user
#: properties with these names.
COLUMN_OF: Final = {
    "TAGS": "tag",
    "KEYS": "keys",
    "UNIQ_KEY": "message_id",
    "__SHARDINGKEY": "message_group",
}

_Found = TypeVar("_Found")


def columns_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the message columns that hold the named properties, each once."""
    return tuple(dict.fromkeys(COLUMN_OF.get(name, "properties") for name in names))


class Columns:
    """Properties of a batch of messages; each is looked up and parsed at most once."""

    def __init__(self, messages: pa.RecordBatch) -> None:
        self._messages = messages
        self._found: dict[tuple[str, str], object] = {}

    def __len__(self) -> int:
        return int(self._messages.num_rows)

    def texts(self, name: str) -> pa.StringArray:
        """Return a property as strings; null where a message lacks it."""
        return self._once("texts", name, find=lambda: self._look_up(name))

    def wholes(self, name: str) -> Parsed:
        """Return a property parsed as 64-bit integers."""
        return self._once("wholes", name, find=lambda: wholes(self.texts(name)))

    def decimals(self, name: str) -> Parsed:
        """Return a property parsed as doubles."""
        return self._once("decimals", name, find=lambda: decimals(self.texts(name)))

    def booleans(self, name: str) -> Parsed:
        """Return a property parsed as booleans."""
        return self._once("booleans", name, find=lambda: booleans(self.texts(name)))

    def _once(self, kind: str, name: str, *, find: Callable[[], _Found]) -> _Found:
        key = kind, name
        if key not in self._found:
            self._found[key] = find()
        found: _Found = self._found[key]  # type: ignore[assignment]
        return found

    def _look_up(self, name: str) -> pa.StringArray:
        column = self._messages.column(COLUMN_OF.get(name, "properties"))
        if name == "KEYS":
            joined = pc.binary_join(column, " ")
            return pc.if_else(pc.equal(joined, ""), pa.scalar(None, pa.string()), joined)
        if name in COLUMN_OF:
            return column
        if column.null_count == len(column):
            return pa.nulls(len(column), pa.string())
        return pc.map_lookup(column, name, "last")


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
            return Truth(*booleans(_texts(operand, columns)))
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
    return wholes(column) if whole else decimals(column)


def _either(one: pa.BooleanArray | None, other: pa.BooleanArray | None) -> pa.BooleanArray | None:
    if one is None or other is None:
        return other if one is None else one
    return pc.or_(one, other)


@dataclass(frozen=True)
class TagFilter:
    """Filter that selects the messages of the given tags, or all messages."""

    expression: str
    #: None for all messages.
    tags: tuple[str, ...] | None

    @property
    def columns(self) -> tuple[str, ...]:
        """Message columns that ``matches`` reads."""
        return () if self.tags is None else ("tag",)

    @cached_property
    def hashes(self) -> Int64s | None:
        """Hashes of the tags, unique and ascending; None for all messages."""
        return None if self.tags is None else np.unique(hash64(pa.array(self.tags, pa.string())))

    def matches(self, messages: pa.Table) -> pa.BooleanArray:
        """Return one boolean per row: True where the message is selected."""
        if self.tags is None:
            return pa.repeat(True, messages.num_rows)
        tags = messages.column("tag").combine_chunks()
        return pc.is_in(tags, value_set=pa.array(self.tags, tags.type))


def parse_tags(expression: str) -> TagFilter:
    """Parse a tag expression: ``*``, an empty string, or tags joined by ``||``.

    Raises:
        FilterExpressionError: the expression has only separators, or a tag has characters that
            the broker refuses in tags.
    """
    if expression.strip() in ("", "*"):
        return TagFilter(expression, None)
    tags = [tag for part in expression.split("||") if (tag := part.strip())]
    if not tags:
        raise FilterExpressionError(
            f"Filter {expression!r} has no tag.", remedy="Give * or tags joined by ||."
        )
    for tag in tags:
        if "|" in tag or any(ord(c) < 32 for c in tag):
            at = expression.index(tag)
            raise FilterExpressionError(
                f"Filter {expression!r} has a tag with | or a control character: {tag!r}, "
                f"at character {at + 1}.",
                remedy="Remove the character; || separates tags.",
            )
    return TagFilter(expression, None if "*" in tags else tuple(dict.fromkeys(tags)))


TAG: Final = "tag"
SQL92: Final = "sql92"
#: Maximum number of cached compiled expressions.
KEPT: Final = 100
#: Chunks with fewer rows on average are combined before evaluation.
_BATCH_ROWS: Final = 4096


@dataclass(frozen=True)
class SqlFilter:
    """Filter that selects the messages for which a SQL92 condition is true."""

    expression: str
    condition: Condition
    #: Message columns that ``matches`` reads.
    columns: tuple[str, ...]

    def matches(self, messages: pa.Table) -> pa.BooleanArray:
        """Return one boolean per row: True where the message is selected."""
        if not self.columns:
            # The condition has no property; a column of nulls supplies the number of rows.
            return matches(self.condition, Columns(_counted(messages.num_rows)))
        looked_at = messages.select(list(self.columns))
        chunks = max(column.num_chunks for column in looked_at.columns)
        if chunks > 1 and looked_at.num_rows < _BATCH_ROWS * chunks:
            looked_at = looked_at.combine_chunks()
        found = [matches(self.condition, Columns(batch)) for batch in looked_at.to_batches()]
        return pa.concat_arrays(found) if found else pa.array([], pa.bool_())


Filter: TypeAlias = TagFilter | SqlFilter


def compile_filter(expression: str, filter_type: str = TAG) -> Filter:
    """Compile a filter expression; equal calls return a cached filter.

    Args:
        expression: a tag expression or a SQL92 condition.
        filter_type: "tag" or "sql92".

    Raises:
        FilterExpressionError: the expression does not parse, or the type is unknown. For SQL92 the
            error shows the position.
    """
    if not isinstance(expression, str):
        raise FilterExpressionError(
            f"The filter is {expression!r}, not a string.",
            remedy="Give the filter expression as a string.",
        )
    if filter_type not in (TAG, SQL92):
        raise FilterExpressionError(
            f"The filter type {filter_type!r} is unknown.",
            remedy=f"Set filter_type to {TAG} or {SQL92}.",
        )
    return _compiled(expression, filter_type)


@lru_cache(KEPT)
def _compiled(expression: str, filter_type: str) -> Filter:
    if filter_type == TAG:
        return parse_tags(expression)
    condition = parse(expression)
    return SqlFilter(expression, condition, columns_of(_names(condition)))


def _names(expression: Expression) -> Iterator[str]:
    """Yield the names of the properties in an expression, with repetitions."""
    match expression:
        case Name(name):
            yield name
        case AllOf(conditions) | AnyOf(conditions):
            for condition in conditions:
                yield from _names(condition)
        case Not(operand) | IsNull(operand) | In(operand) | Match(operand=operand):
            yield from _names(operand)
        case Equal(left, right) | Order(left=left, right=right):
            yield from _names(left)
            yield from _names(right)


def _counted(n: int) -> pa.RecordBatch:
    return pa.record_batch({"row": pa.nulls(n)})
