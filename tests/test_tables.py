import struct
from typing import Any

import pyarrow as pa
import pytest

from rmq_pipeline import limits, schema
from rmq_pipeline.errors import TableSchemaError
from rmq_pipeline.tables import check_size, columns_of, sound, with_sound_texts
from tests.damaged_tables import DAMAGES, Damage

SOUND = pa.table(
    {
        "body": pa.array([b"a", b"\xff", b""], pa.binary_view()),
        "tag": pa.array(["a", "b", "a"]).dictionary_encode(),
        "keys": pa.array([["k"], [], None], schema.KEYS),
        "properties": pa.array([[("a", "b")], [], None], schema.PROPERTIES),
    }
)


def texts(*given: bytes) -> pa.Array:
    ends = [sum(map(len, given[:n])) for n in range(len(given) + 1)]
    buffers = [
        None,
        pa.py_buffer(struct.pack(f"<{len(ends)}i", *ends)),
        pa.py_buffer(b"".join(given)),
    ]
    return pa.Array.from_buffers(pa.string(), len(given), buffers)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_column_is_refused(damage: Damage) -> None:
    with pytest.raises(TableSchemaError, match=r"Column c of rows is damaged: .*build the table"):
        sound(damage.table("c", n=[1, 2, 3]), "rows")


@pytest.mark.parametrize("name", ["body", "tag", "keys", "deliver_at_ms"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_column_of_a_batch_is_refused(damage: Damage, name: str) -> None:
    others = {"body": [b"a"] * 3} if name != "body" else {}

    with pytest.raises(TableSchemaError, match=f"Column {name} .*damaged"):
        columns_of(damage.table(name, **others), schema.SEND)


def test_a_sound_table_is_taken() -> None:
    assert sound(SOUND, "rows") is SOUND
    assert columns_of(SOUND.slice(1), schema.SEND)["tag"].to_pylist() == ["b", "a"]


def test_texts_that_are_not_utf8_are_left_to_those_who_know_the_row() -> None:
    broken = texts(b"a", b"\xff")
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), broken)
    given = pa.table({"body": [b"x"] * 2, "tag": broken, "keys": lists})

    columns = columns_of(given, schema.SEND)

    assert columns["tag"].view(pa.binary()).to_pylist() == [b"a", b"\xff"]
    with pytest.raises(TableSchemaError, match="Column tag of rows"):
        sound(given, "rows")


@pytest.mark.parametrize(
    ("of_type", "of_bytes", "given", "expected"),
    [
        (pa.string(), pa.binary(), b"a\xff", "a\ufffd"),
        (pa.large_string(), pa.large_binary(), b"a\xff", "a\ufffd"),
        (pa.list_(pa.string()), pa.list_(pa.binary()), [b"\xff\xfe", None], ["\ufffd\ufffd", None]),
        (
            pa.list_(pa.list_(pa.string())),
            pa.list_(pa.list_(pa.binary())),
            [[b"\xff"], None],
            [["\ufffd"], None],
        ),
        (
            pa.map_(pa.string(), pa.string()),
            pa.map_(pa.binary(), pa.binary()),
            [(b"\xff", b"\xfe"), (b"b", None)],
            [("\ufffd", "\ufffd"), ("b", None)],
        ),
        (
            pa.map_(pa.string(), pa.int64()),
            pa.map_(pa.string(), pa.int64()),
            [("a", 1)],
            [("a", 1)],
        ),
        (pa.binary(), pa.binary(), b"\xff", b"\xff"),
    ],
    ids=str,
)
def test_bytes_that_are_not_utf8_are_replaced_in_texts_only(
    of_type: pa.DataType, of_bytes: pa.DataType, given: Any, expected: Any
) -> None:
    broken = pa.record_batch({"c": pa.array([given, None], of_bytes).view(of_type)})

    replaced = with_sound_texts(broken)

    replaced.validate(full=True)
    assert replaced.schema == broken.schema
    assert replaced["c"].to_pylist() == [expected, None]


def test_broken_texts_do_not_hide_broken_offsets() -> None:
    column = texts(b"\xff", b"b", b"c")
    ends, far = struct.pack("<4i", 0, 1, 2, 3), struct.pack("<4i", 0, 1, 2, 3000)
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 3], pa.int32()), column)
    far_lists = struct.pack("<3i", 0, 1, 50)

    for table in (
        Damage(column, ends, far).table("tag", body=[b"x"] * 3),
        Damage(lists, struct.pack("<3i", 0, 1, 3), far_lists).table("keys", priority=[1, 2]),
    ):
        with pytest.raises(TableSchemaError, match="damaged"):
            columns_of(table, schema.SEND)


@pytest.mark.parametrize(
    "column",
    [
        pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), [b"x" * limits.MIB]),
        pa.Array.from_buffers(
            pa.binary_view(), 300,
            [None, pa.py_buffer(struct.pack("<i4sii", limits.MIB, b"xxxx", 0, 0) * 300),
             pa.py_buffer(b"x" * limits.MIB)],
        ),
        pa.array([[[None] * 3000]], pa.list_(pa.list_(pa.null()))),
        pa.RunEndEncodedArray.from_arrays(pa.array([1 << 30], pa.int32()), ["x"]),
    ],
    ids=["dictionary", "view", "nulls", "runs"],
)  # fmt: skip
def test_a_column_that_becomes_large_is_refused(
    column: pa.Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TABLE_ROWS", 2)

    with pytest.raises(TableSchemaError, match=r"once expanded|Convert it|cannot hold them"):
        check_size(pa.chunked_array([column]), "c")


@pytest.mark.parametrize("of_type", [pa.list_view(pa.string()), pa.large_list_view(pa.string())])
def test_a_list_view_is_refused_as_arrow_casts_it_to_wrong_offsets(of_type: pa.DataType) -> None:
    given = pa.table({"body": [b"a"] * 3, "keys": pa.array([["a"], None, ["b", "c"]], of_type)})

    with pytest.raises(TableSchemaError, match=r"Column keys has type .*Convert it to plain"):
        columns_of(given, schema.SEND)


def test_rows_without_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TABLE_ROWS", 2)
    nothing = pa.array([{}] * 3, pa.struct([]))

    for table in (
        pa.Table.from_batches([pa.RecordBatch.from_struct_array(nothing)]),
        pa.table({"body": pa.nulls(3)}),
    ):
        with pytest.raises(TableSchemaError, match=r"has 3 rows.*Split it"):
            columns_of(table, schema.SEND)
