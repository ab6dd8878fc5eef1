"""Columns whose types change: what has a form in the other type has it, and the rest is null."""

import random
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import state_columns
from rmq_pipeline.state_columns import converted, together

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
        ([["x"]], [[]], [["x"], []]),
        (["x"], [None], ["x", None]),
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


NUMBERS = [pa.int64(), pa.uint8(), pa.float32(), pa.float64(), pa.decimal128(9, 2)]


@pytest.mark.parametrize("to", NUMBERS)
@pytest.mark.parametrize("of_type", [pa.string(), pa.large_string()])
def test_texts_are_the_numbers_that_each_is_alone(of_type: pa.DataType, to: pa.DataType) -> None:
    chosen = random.Random(7)
    texts = ["".join(chosen.choices("0019-+.eExXaF ", k=1 + i % 5)) for i in range(3000)]
    texts += [
        "inf",
        "-Infinity",
        "NaN",
        "nan(a)",
        "0x1F",
        "-0X1f",
        "1e3",
        "+.5E-1",
        "5.",
        "",
        "0\n",
    ]
    alone = [state_columns._cast(pa.array([text], of_type), to) for text in texts]
    expected = pa.concat_arrays([pa.nulls(1, to) if one is None else one for one in alone])

    found = converted(pa.chunked_array([pa.array(texts, of_type)]), to)

    assert str(found.to_pylist()) == str(expected.to_pylist())
    assert 0 < found.null_count < len(texts)


@pytest.mark.parametrize("to", NUMBERS)
def test_many_texts_that_are_no_numbers_are_found_at_once(
    monkeypatch: pytest.MonkeyPatch, to: pa.DataType
) -> None:
    casts: list[int] = []
    original = state_columns._cast

    def cast(values: pa.Array, to: pa.DataType) -> pa.Array | None:
        casts.append(len(values))
        return original(values, to)

    monkeypatch.setattr(state_columns, "_cast", cast)
    texts = pa.array([f"x{i}" if i % 3 else "7" for i in range(10_000)])

    found = converted(pa.chunked_array([texts]), to)

    assert found.null_count == 6666
    assert len(casts) < 10
