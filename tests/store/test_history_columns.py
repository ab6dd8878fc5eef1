"""Columns whose types change: what has a form in the other type has it, and the rest is null."""

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline.store.history_columns import converted, together

FIXED = pa.schema([("position", pa.int64())])


def rows(position: int, **columns: pa.Array) -> pa.Table:
    return pa.table({"position": [position], **columns})


@pytest.mark.parametrize(
    ("values", "to", "expected"),
    [
        (pa.array(["1", "many", None, "3"]), pa.int64(), [1, None, None, 3]),
        (pa.array([b"ab", b"abc"]), pa.binary(3), [None, b"abc"]),
        (pa.array([[b"ab"], [b"abc"]]), pa.list_(pa.binary(3)), [None, [b"abc"]]),
        (pa.array([[1, 2], [1]]), pa.list_(pa.int64(), 2), [[1, 2], None]),
        (pa.array([{"a": 1}]), pa.int64(), [None]),
        (pa.array([{"a": 1}]), pa.struct({"b": pa.int64()}), [{"b": None}]),
        (pa.array([1, 1 << 62]), pa.decimal128(5, 2), [Decimal("1.00"), None]),
        (pa.array([1 << 62], pa.timestamp("us")), pa.timestamp("ns"), [None]),
        (pa.array(["a", None]), pa.dictionary(pa.int32(), pa.string()), ["a", None]),
        (pa.array([], pa.string()), pa.int64(), []),
    ],
)
def test_a_value_without_a_form_becomes_null(
    values: pa.Array, to: pa.DataType, expected: list[Any]
) -> None:
    found = converted(pa.chunked_array([values]), to)

    found.validate(full=True)
    assert found.type == to
    assert found.to_pylist() == expected


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([1], [2.5], [1.0, 2.5]),
        (["x"], [1], [None, 1]),
        ([1], ["x"], ["1", "x"]),
        ([[1]], [{"a": 1}], [None, {"a": 1}]),
        ([{"a": 1}], [{"b": 2}], [{"a": 1, "b": None}, {"a": None, "b": 2}]),
        ([1], [Decimal("1.25")], [Decimal("1.00"), Decimal("1.25")]),
    ],
)
def test_a_column_has_the_type_that_all_go_into_or_the_newest(
    old: list[Any], new: list[Any], expected: list[Any]
) -> None:
    found = together([rows(1, v=pa.array(old)), rows(2, v=pa.array(new))], fixed=FIXED)

    found.validate(full=True)
    assert found["v"].to_pylist() == expected


def test_columns_that_differ_by_case_are_one_but_for_those_that_are_fixed() -> None:
    found = together(
        [rows(1, Score=pa.array([1]), Position=pa.array(["x"])), rows(2, score=pa.array([2]))],
        fixed=FIXED,
    )

    assert found.to_pylist() == [
        {"position": 1, "score": 1, "Position": "x"},
        {"position": 2, "score": 2, "Position": None},
    ]


def test_the_newest_type_is_that_of_the_last_table() -> None:
    tables = [rows(1, v=pa.array([1])), rows(2, v=pa.array([[2]])), rows(3, v=pa.array([3]))]

    found = together(tables, fixed=FIXED).sort_by("position")

    assert found["v"].to_pylist() == [1, None, 3]
