import struct

import pyarrow as pa
import pytest

from rmq_pipeline import limits, schema
from rmq_pipeline.errors import TableSchemaError
from rmq_pipeline.tables import check_size, columns_of, sound
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
