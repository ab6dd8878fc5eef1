"""Filter expressions, compiled once and evaluated on tables of messages."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmq_pipeline.errors import FilterExpressionError
from rmq_pipeline.filter.evaluation import Columns, columns_of, matches
from rmq_pipeline.filter.parser import (
    AllOf,
    AnyOf,
    Condition,
    Equal,
    Expression,
    In,
    IsNull,
    Match,
    Name,
    Not,
    Order,
    parse,
)
from rmq_pipeline.message import Int64s, hash64


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
