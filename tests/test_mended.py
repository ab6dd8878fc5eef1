"""Damaged lists and maps of an older home are null in the damaged rows, and in no other."""

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rmq_pipeline.tables import mended

#: Three rows: the offsets of the second go back.
BACK = (0, 2, 1, 3)
FAR = (0, 1, 2, 3000)
NEGATIVE = (0, -1, 2, 3)


def ends(*offsets: int, large: bool = False) -> pa.Buffer:
    return pa.py_buffer(struct.pack(f"<{len(offsets)}{'q' if large else 'i'}", *offsets))


def damaged(of_type: pa.DataType, offsets: tuple[int, ...], child: pa.Array) -> pa.RecordBatch:
    """Damaged after it was made: Arrow makes no such array."""
    of_ends = np.zeros(len(offsets), np.int64 if pa.types.is_large_list(of_type) else np.int32)
    buffers = [None, pa.py_buffer(of_ends)]
    made = pa.Array.from_buffers(of_type, len(offsets) - 1, buffers, children=[child])
    found = batch_of(made)
    of_ends[:] = offsets
    return found


def lists(of_type: pa.DataType, offsets: tuple[int, ...], child: pa.Array) -> pa.Array:
    return damaged(of_type, offsets, child)["c"]


def batch_of(column: pa.Array) -> pa.RecordBatch:
    return pa.record_batch({"c": column, "sound": range(len(column))})


def read(given: pa.Array | pa.RecordBatch) -> list[Any]:
    batch = batch_of(given) if isinstance(given, pa.Array) else given
    found = mended(batch)
    found.validate(full=True)
    assert found["sound"].to_pylist() == list(range(batch.num_rows))
    rows: list[Any] = found["c"].to_pylist()
    return rows


NUMBERS = pa.array([10, 11, 12])
KEY = pa.field("key", pa.string(), nullable=False)
PAIRS = pa.array(
    [{"key": f"k{i}", "value": i} for i in range(3)], pa.struct([KEY, ("value", pa.int64())])
)
A, B, C = ("k0", 0), ("k1", 1), ("k2", 2)


@pytest.mark.parametrize(
    ("offsets", "rows"),
    [
        (BACK, [[10, 11], None, [11, 12]]),
        (FAR, [[10], [11], None]),
        (NEGATIVE, [None, None, [12]]),
        ((5, 6, 7, 8), [None] * 3),
    ],
)
@pytest.mark.parametrize("make", [pa.list_, pa.large_list])
def test_a_list_is_null_where_its_offsets_are_damaged(
    make: Any, offsets: tuple[int, ...], rows: list[Any]
) -> None:
    assert read(damaged(make(pa.int64()), offsets, NUMBERS)) == rows


@pytest.mark.parametrize(
    ("offsets", "rows"), [(BACK, [[A, B], None, [B, C]]), (FAR, [[A], [B], None])]
)
def test_a_map_is_null_where_its_offsets_are_damaged(
    offsets: tuple[int, ...], rows: list[Any]
) -> None:
    assert read(damaged(pa.map_(pa.string(), pa.int64()), offsets, PAIRS)) == rows


def test_a_list_keeps_its_nulls_and_a_slice_its_place() -> None:
    whole = lists(pa.list_(pa.int64()), (0, 1, 1, 2, 1, 3), NUMBERS)
    column = pa.Array.from_buffers(
        whole.type, 5, [pa.py_buffer(b"\x1d"), whole.buffers()[1]], children=[NUMBERS]
    )

    assert read(column) == [[10], None, [11], None, [11, 12]]
    assert read(column.slice(2, 3)) == [[11], None, [11, 12]]


def test_a_list_of_lists_is_null_where_one_of_them_is_damaged() -> None:
    inner = lists(pa.list_(pa.int64()), BACK, NUMBERS)
    column = pa.ListArray.from_arrays(pa.array([0, 1, 2, 2, 3], pa.int32()), inner)

    assert read(column) == [[[10, 11]], None, [], [[11, 12]]]


def test_a_list_and_a_map_of_texts_are_null_where_a_text_is_damaged() -> None:
    texts = pa.Array.from_buffers(pa.string(), 3, [None, ends(0, 4, 2, 6), pa.py_buffer(b"abcdef")])
    each = pa.array([0, 1, 2, 3], pa.int32())
    by_key = pa.MapArray.from_arrays(each, texts, NUMBERS)
    by_item = pa.MapArray.from_arrays(each, pa.array(["x", "y", "z"]), texts)

    assert read(pa.ListArray.from_arrays(each, texts)) == [["abcd"], None, ["cdef"]]
    assert read(by_key) == [[("abcd", 10)], None, [("cdef", 12)]]
    assert read(by_item) == [[("x", "abcd")], None, [("z", "cdef")]]


def test_a_field_of_a_struct_is_null_where_it_is_damaged() -> None:
    damaged = lists(pa.list_(pa.int64()), BACK, NUMBERS)
    column = pa.StructArray.from_arrays([damaged, NUMBERS], ["l", "n"])

    assert read(column) == [
        {"l": [10, 11], "n": 10},
        {"l": None, "n": 11},
        {"l": [11, 12], "n": 12},
    ]


def test_large_texts_are_null_where_they_are_damaged() -> None:
    buffers = [None, ends(0, 4, 2, 6, large=True), pa.py_buffer(b"abcdef")]

    assert read(pa.Array.from_buffers(pa.large_string(), 3, buffers)) == ["abcd", None, "cdef"]


def test_lists_that_overlap_do_not_become_very_many_values() -> None:
    many = pa.array(range(1_000))
    column = lists(pa.list_(pa.int64()), (0, 1_000) * 500, many)

    found = read(column)

    assert len([row for row in found if row]) == 8
    assert found[0] == list(range(1_000))
