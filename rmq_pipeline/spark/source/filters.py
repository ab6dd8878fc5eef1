"""Filters that Spark pushes into a batch read: what they exclude, and what Spark evaluates.

A pushed filter narrows the read at four places, from cheap to exact: the driver drops topics,
queues, offsets and segments; a task skips row groups by the statistics of the file and by its key
index; it decodes the columns of the filters first, and the others only if a row is left; and only
matching rows travel to Spark. Conditions on ``keys`` only skip, so Spark evaluates them again.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)
from pyspark.sql.types import IntegerType, LongType, StringType, StructType

from rmq_pipeline.archive.key_index import OneIndex

#: Columns with one value in all messages of a task.
CONSTANT_COLUMNS: Final = ("topic", "queue_id")
_KEYS: Final = "keys"
#: Spark's types of columns whose filters the source evaluates, with Python's types of their values.
#: A schema of the user's may give a column another type, for which a filter means something else.
_TYPES: Final = {
    "topic": (StringType(), str),
    "queue_id": (IntegerType(), int),
    "queue_offset": (LongType(), int),
    "message_id": (StringType(), str),
    "tag": (StringType(), str),
    "message_group": (StringType(), str),
    "born_at_ms": (LongType(), int),
    "stored_at_ms": (LongType(), int),
    "deliver_at_ms": (LongType(), int),
}
_NULLS: Final = (IsNull, IsNotNull)
_ONE_VALUE: Final = (
    EqualTo,
    EqualNullSafe,
    LessThan,
    LessThanOrEqual,
    GreaterThan,
    GreaterThanOrEqual,
    StringStartsWith,
)
#: Values of In that are compared one by one; more are not pushed.
_MOST_VALUES: Final = 10_000
#: Ids that are looked up in an index one by one.
_MOST_IDS: Final = 100
#: Tags of one filter at the broker, and tags that its syntax can name.
_MOST_TAGS: Final = 100
_TAG: Final = re.compile(r"[\w.%-]+", re.ASCII)

#: The smallest and the largest value, both inclusive; None: unbounded.
Range: TypeAlias = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Pushed:
    """Filters that a read evaluates, all of which a message must match."""

    #: On scalar columns; evaluated exactly.
    exact: tuple[Filter, ...] = ()
    #: On ``keys``: lists of which a message must have one in full; Spark compares again.
    keys: tuple[tuple[tuple[str, ...], ...], ...] = ()

    @classmethod
    def of(cls, filters: Sequence[Filter], schema: StructType) -> "tuple[Pushed, list[Filter]]":
        """Return the filters that the source uses, and those that Spark must evaluate."""
        exact, keys, left = [], [], []
        for each in filters:
            if _is_exact(each, schema):
                exact.append(each)
                continue
            left.append(each)
            if (lists := _lists_of_keys(each)) is not None:
                keys.append(lists)
        return cls(tuple(exact), tuple(keys)), left

    @property
    def columns(self) -> set[str]:
        """Columns of a file that ``rows`` compares."""
        return {_column(each) for each in self.exact} - set(CONSTANT_COLUMNS)

    def holds_for(self, topic: str, queue_id: int) -> bool:
        """Return True if messages of a queue may match."""
        row = pa.table(
            {
                "topic": pa.array([topic], pa.string()),
                "queue_id": pa.array([queue_id], pa.int32()),
            }
        )
        here = [each for each in self.exact if _column(each) in CONSTANT_COLUMNS]
        return bool(_matching(row, here).num_rows)

    def rows(self, table: pa.Table) -> pa.Table:
        """Return the matching rows of a table, which lacks topic and queue_id."""
        return _matching(table, [f for f in self.exact if _column(f) not in CONSTANT_COLUMNS])

    def range(self, column: str) -> Range:
        """Return the range in which the values of an integer column must be."""
        bounds = [_bounds(each) for each in self.exact if _column(each) == column]
        lows = [low for low, _ in bounds if low is not None]
        highs = [high for _, high in bounds if high is not None]
        return max(lows, default=None), min(highs, default=None)

    def values(self, column: str) -> set[str] | None:
        """Return the values that a text column may have; None: any."""
        found: set[str] | None = None
        for each in self.exact:
            if _column(each) == column and (values := _named(each)) is not None:
                found = values if found is None else found & values
        return found

    @property
    def message_ids(self) -> set[str] | None:
        """The few message ids that may match; None: any, or many."""
        ids = self.values("message_id")
        return ids if ids is not None and len(ids) <= _MOST_IDS else None

    def indexed(self, index: OneIndex) -> set[int]:
        """Return the row groups that may have matches, judging by the index of a segment.

        Requires filters on keys, or ``message_ids``.
        """
        sets = [set().union(*map(index.with_keys, lists)) for lists in self.keys]
        if (ids := self.message_ids) is not None:
            sets.append(set().union(*map(index.with_id, ids)))
        return set.intersection(*sets)

    def may_be_in(self, facts: Mapping[str, Any]) -> bool:
        """Return True if a segment may have matches, judging by its times in the manifest."""
        return all(
            _overlaps(self.range(name), low=facts.get(f"min_{name}"), high=facts.get(f"max_{name}"))
            for name in ("stored_at_ms", "born_at_ms")
        )

    def row_groups(self, footer: pq.FileMetaData) -> list[int]:
        """Return the row groups that may have matches, judging by the statistics of the file."""
        flat = {footer.schema.column(i).path: i for i in range(footer.num_columns)}
        asked = [each for each in self.exact if _column(each) in flat]
        return [
            group
            for group in range(footer.num_row_groups)
            if all(
                _may_match(each, footer.row_group(group).column(flat[_column(each)]))
                for each in asked
            )
        ]


def tag_filter(pushed: Pushed) -> str:
    """Return the broker's filter for the tags that messages may have; ``*``: any."""
    tags = pushed.values("tag")
    if not tags or len(tags) > _MOST_TAGS or not all(_TAG.fullmatch(tag) for tag in tags):
        return "*"
    return " || ".join(sorted(tags))


def _column(each: Filter) -> str:
    inner = each.child if isinstance(each, Not) else each
    path: tuple[str, ...] = inner.attribute  # type: ignore[attr-defined]
    return path[0] if len(path) == 1 else ""


def _is_exact(each: Filter, schema: StructType) -> bool:
    inner = each.child if isinstance(each, Not) else each
    if not isinstance(inner, (*_NULLS, *_ONE_VALUE, In)):
        return False
    name = _column(each)
    if name not in _TYPES or schema[name].dataType != _TYPES[name][0]:
        return False
    if isinstance(inner, _NULLS):
        return True
    wanted = _TYPES[name][1]
    if isinstance(inner, In):
        fits = all(value is None or type(value) is wanted for value in inner.value)
        return fits and len(inner.value) <= _MOST_VALUES
    if inner.value is None:
        return isinstance(inner, EqualNullSafe)
    return type(inner.value) is wanted


def _lists_of_keys(each: Filter) -> tuple[tuple[str, ...], ...] | None:
    """Return the lists that ``keys`` may equal; None if the filter says nothing about them."""
    if not isinstance(each, EqualTo | EqualNullSafe | In) or _column(each) != _KEYS:
        return None
    lists = each.value if isinstance(each, In) else (each.value,)
    some = [keys for keys in lists if keys is not None or not isinstance(each, In)]
    if not all(isinstance(keys, list) and keys and _all_texts(keys) for keys in some):
        return None  # an empty list or a null key is in no index
    return tuple(tuple(keys) for keys in some)


def _all_texts(keys: list[Any]) -> bool:
    return all(isinstance(key, str) for key in keys)


def _matching(table: pa.Table, filters: Sequence[Filter]) -> pa.Table:
    """Return the rows for which all filters are true; neither false nor null."""
    if not filters or not table.num_rows:
        return table
    return table.filter(reduce(and_, (_expression(each, table.schema) for each in filters)))


def _expression(each: Filter, schema: pa.Schema) -> pc.Expression:
    if isinstance(each, Not):
        known = _expression(each.child, schema)
        if isinstance(each.child, In):
            if None in each.child.value:
                return pc.scalar(False)  # false or null, never true
            return ~known & pc.field(_column(each)).is_valid()
        return ~known
    column = pc.field(_column(each))
    if isinstance(each, IsNull):
        return column.is_null()
    if isinstance(each, IsNotNull):
        return column.is_valid()
    type_ = schema.field(_column(each)).type
    if isinstance(each, In):
        return column.isin(pa.array([value for value in each.value if value is not None], type_))
    value = each.value  # type: ignore[attr-defined]
    if isinstance(each, EqualNullSafe):
        # Never null, so that its negation is right, too.
        same = column == pa.scalar(value, type_)
        return column.is_null() if value is None else same & column.is_valid()
    if isinstance(each, StringStartsWith):
        return pc.starts_with(column, value)
    compare: Callable[[Any, Any], pc.Expression] = _OPERATORS[type(each)]
    return compare(column, pa.scalar(value, type_))


_OPERATORS: Final[dict[type, Callable[[Any, Any], Any]]] = {
    EqualTo: lambda column, value: column == value,
    LessThan: lambda column, value: column < value,
    LessThanOrEqual: lambda column, value: column <= value,
    GreaterThan: lambda column, value: column > value,
    GreaterThanOrEqual: lambda column, value: column >= value,
}


def _bounds(each: Filter) -> Range:
    if isinstance(each, EqualTo | EqualNullSafe) and each.value is not None:
        return each.value, each.value
    if isinstance(each, In):
        some = [value for value in each.value if value is not None]
        return min(some, default=None), max(some, default=None)
    if isinstance(each, GreaterThan | GreaterThanOrEqual):
        return each.value + isinstance(each, GreaterThan), None
    if isinstance(each, LessThan | LessThanOrEqual):
        return None, each.value - isinstance(each, LessThan)
    return None, None


def _named(each: Filter) -> set[str] | None:
    if isinstance(each, EqualTo | EqualNullSafe) and each.value is not None:
        return {each.value}
    if isinstance(each, In):
        return {value for value in each.value if value is not None}
    return None


def _overlaps(wanted: Range, *, low: Any, high: Any) -> bool:
    least, most = wanted
    if low is None or high is None:
        return True
    return (least is None or high >= least) and (most is None or low <= most)


def _may_match(each: Filter, column: pq.ColumnChunkMetaData) -> bool:
    """Return True if a row group may have a match; True if its statistics do not tell."""
    facts = column.statistics
    if facts is None:
        return True
    if isinstance(each, IsNull) or (isinstance(each, EqualNullSafe) and each.value is None):
        return not facts.has_null_count or facts.null_count > 0
    if facts.has_null_count and facts.null_count == column.num_values:
        return isinstance(each, Not)  # every other filter needs a value
    if not facts.has_min_max or isinstance(each, Not | IsNotNull):
        return True
    low, high = facts.min, facts.max
    if isinstance(each, StringStartsWith):
        return bool(high >= each.value and low[: len(each.value)] <= each.value)
    if isinstance(each, In):
        return any(low <= value <= high for value in each.value if value is not None)
    if isinstance(each, EqualTo | EqualNullSafe):
        return bool(low <= each.value <= high)
    if isinstance(each, LessThan | LessThanOrEqual):
        return bool(low < each.value or (isinstance(each, LessThanOrEqual) and low == each.value))
    return bool(
        high > each.value  # type: ignore[attr-defined]
        or (isinstance(each, GreaterThanOrEqual) and high == each.value)
    )
