"""Readers of Delta tables see a sink's versions as our own readers do, and cannot write to it."""

import datetime as dt
import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake.exceptions import CommitFailedError

from rmq_pipeline import checked_parquet, durable_files, schema
from rmq_pipeline.handling import sink
from rmq_pipeline.lake import delta, manifest, readers

HOUR_MS = 3_600_000
FIVE_MS = 1_357_016_400_000
SECOND = dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC)
ROW = pa.schema([("n", pa.int64()), ("born_at_ms", pa.int64())])


def rows(*numbers: int) -> pa.Table:
    """A row a number, an hour a number."""
    return pa.table([list(numbers), [FIVE_MS + n * HOUR_MS for n in numbers]], schema=ROW)


def staged(folder: Path | str, table: pa.Table, *, batch: int = 0) -> pa.Table:
    return sink.stage(folder, table, partition_time="born_at_ms", epoch=1, batch=batch)


def begun(folder: Path | str, columns: pa.Schema | None = None) -> None:
    nothing = schema.SINK_FILE.empty_table().replace_schema_metadata({"version": "0"})
    manifest.publish(folder, nothing, known=manifest.NOTHING, columns=columns)


def in_delta(folder: Path, version: int | None = None) -> list[str]:
    """The current files as deltalake lists them, relative to the sink."""
    uris = deltalake.DeltaTable(folder, version=version).file_uris()
    return sorted(str(Path(uri).relative_to(folder)) for uri in uris)


def of_format_2(folder: Path, files: pa.Table, *, version: int, remove: Sequence[str] = ()) -> Path:
    """Write a manifest of format 2: a checkpoint, and the last file in the entry behind it."""
    own = folder / "_manifest-1a2b3c4d"
    own.mkdir(parents=True)
    checked_parquet.write(files.slice(0, files.num_rows - 1), own / f"{version - 1:020}.checkpoint")
    last = files.slice(files.num_rows - 1).to_pylist()
    entry = {"version": version, "add": last, "remove": list(remove)}
    (own / f"{version:020}.json").write_bytes(durable_files.dump_json(entry))
    pointer = {"format": 2, "folder": own.name}
    (folder / manifest.NAME).write_bytes(durable_files.dump_json(pointer))
    return own


def listed(folder: Path) -> list[str]:
    return sorted(manifest.read(folder).files["path"].to_pylist())


def test_deltalake_and_polars_read_what_the_manifest_lists(tmp_path: Path) -> None:
    begun(tmp_path, ROW)
    first = staged(tmp_path, rows(0, 1, 1))
    manifest.record(tmp_path, 1, add=first)
    manifest.record(
        tmp_path, 2, add=staged(tmp_path, rows(2)), remove=first["path"].to_pylist()[:1]
    )
    staged(tmp_path, rows(7))  # no settle names it

    table = deltalake.DeltaTable(tmp_path)

    assert readers.sink_table(tmp_path)["n"].to_pylist() == [1, 1, 2]
    assert sorted(table.to_pyarrow_table()["n"].to_pylist()) == [1, 1, 2]
    assert sorted(pl.read_delta(str(tmp_path))["n"]) == [1, 1, 2]
    only = table.to_pyarrow_table(filters=[("hour", "=", "2013-01-01T07")])
    assert only.select(ROW.names).to_pylist() == rows(2).to_pylist()


def test_a_version_of_the_table_is_a_version_of_the_sink(tmp_path: Path) -> None:
    begun(tmp_path, ROW)
    files = [staged(tmp_path, rows(n)) for n in range(4)]
    for version, add in enumerate(files, 1):
        gone = files[0]["path"].to_pylist() if version == 4 else []
        manifest.record(tmp_path, version, add=add, remove=gone)

    paths = [file["path"][0].as_py() for file in files]
    assert in_delta(tmp_path, 0) == []
    assert in_delta(tmp_path, 2) == paths[:2]
    assert in_delta(tmp_path, 3) == paths[:3]
    assert in_delta(tmp_path) == paths[1:] == listed(tmp_path)


def test_an_empty_sink_is_a_table_with_its_columns(tmp_path: Path) -> None:
    begun(tmp_path, ROW)

    assert deltalake.DeltaTable(tmp_path).to_pyarrow_table().num_rows == 0
    assert pl.read_delta(str(tmp_path)).columns == ["n", "born_at_ms", "hour"]


def test_versions_behind_a_gap_are_read_from_a_checkpoint(tmp_path: Path) -> None:
    begun(tmp_path, ROW)
    manifest.record(tmp_path, 1, add=staged(tmp_path, rows(0)))
    late = pa.concat_tables([manifest.read(tmp_path).files, staged(tmp_path, rows(1, 2))])

    assert not manifest.record(tmp_path, 9, add=staged(tmp_path, rows(3)))
    assert len(in_delta(tmp_path)) == 1
    seven = late.replace_schema_metadata({"version": "7"})
    manifest.publish(tmp_path, seven, known=manifest.read(tmp_path))

    assert deltalake.DeltaTable(tmp_path).version() == 7
    assert in_delta(tmp_path) == listed(tmp_path) == sorted(late["path"].to_pylist())
    assert manifest.record(tmp_path, 8, add=staged(tmp_path, rows(3)))
    assert in_delta(tmp_path) == listed(tmp_path)


def test_a_group_that_was_created_again_has_a_new_list_in_one_commit(tmp_path: Path) -> None:
    begun(tmp_path, ROW)
    for version in range(1, 6):
        manifest.record(tmp_path, version, add=staged(tmp_path, rows(version)))
    new = staged(tmp_path, rows(9)).replace_schema_metadata({"version": "1"})

    manifest.publish(tmp_path, new, known=manifest.read(tmp_path))
    manifest.record(tmp_path, 2, add=staged(tmp_path, rows(10)))

    assert manifest.read(tmp_path).version == 2
    assert in_delta(tmp_path) == listed(tmp_path)
    assert sorted(readers.sink_table(tmp_path)["n"].to_pylist()) == [9, 10]
    assert len(in_delta(tmp_path, 5)) == 5


def test_a_publisher_that_was_killed_before_the_pointer_costs_nothing(tmp_path: Path) -> None:
    begun(tmp_path, ROW)
    manifest.record(tmp_path, 1, add=staged(tmp_path, rows(1)))
    one = manifest.read(tmp_path).files.replace_schema_metadata({"version": "1"})
    (tmp_path / manifest.NAME).unlink()

    assert manifest.publish(tmp_path, one, known=manifest.read(tmp_path))
    manifest.record(tmp_path, 2, add=staged(tmp_path, rows(2)))

    assert (tmp_path / manifest.NAME).exists()
    assert manifest.read(tmp_path).version == deltalake.DeltaTable(tmp_path).version() == 2
    assert in_delta(tmp_path) == listed(tmp_path)
    assert readers.sink_table(tmp_path)["n"].to_pylist() == [1, 2]


def test_a_publisher_that_was_killed_behind_a_checkpoint_costs_nothing(tmp_path: Path) -> None:
    """Some readers want the commit of a checkpoint's version."""
    begun(tmp_path, ROW)
    seven = staged(tmp_path, rows(1)).replace_schema_metadata({"version": "7"})
    manifest.publish(tmp_path, seven, known=manifest.read(tmp_path))
    commit = tmp_path / manifest.LOG / f"{7:020}.json"
    commit.unlink()

    assert manifest.record(tmp_path, 8, add=staged(tmp_path, rows(2)))
    assert in_delta(tmp_path) == listed(tmp_path)
    now = manifest.read(tmp_path).files.replace_schema_metadata({"version": "8"})
    assert manifest.publish(tmp_path, now, known=manifest.read(tmp_path))

    assert commit.exists()
    assert manifest.read(tmp_path).version == 8
    assert in_delta(tmp_path) == listed(tmp_path)
    assert len(listed(tmp_path)) == 2


def test_of_two_publishers_that_begin_one_begins_again(tmp_path: Path) -> None:
    """A window and its successor, or a window and a compaction, of a new sink."""
    nothing = schema.SINK_FILE.empty_table().replace_schema_metadata({"version": "0"})
    first = staged(tmp_path, rows(1))
    one = first.replace_schema_metadata({"version": "1"})
    assert manifest.publish(tmp_path, nothing, known=manifest.NOTHING)

    assert not manifest.publish(tmp_path, one, known=manifest.NOTHING)
    assert manifest.publish(tmp_path, one, known=manifest.read(tmp_path))

    assert manifest.record(tmp_path, 1, add=first)
    assert manifest.record(tmp_path, 2, add=staged(tmp_path, rows(2)))
    assert readers.sink_table(tmp_path)["n"].to_pylist() == [1, 2]
    assert manifest.read(tmp_path).version == deltalake.DeltaTable(tmp_path).version() == 2


def test_what_was_read_of_an_earlier_life_of_the_sink_is_not_published(tmp_path: Path) -> None:
    begun(tmp_path, ROW)
    manifest.record(tmp_path, 1, add=staged(tmp_path, rows(1)))
    before = manifest.read(tmp_path)
    late = pa.concat_tables([before.files, staged(tmp_path, rows(5))])
    new = staged(tmp_path, rows(9)).replace_schema_metadata({"version": "1"})
    manifest.publish(tmp_path, new, known=before)

    two = late.replace_schema_metadata({"version": "2"})
    assert not manifest.publish(tmp_path, two, known=before)

    assert manifest.record(tmp_path, 2, add=staged(tmp_path, rows(10)))
    assert readers.sink_table(tmp_path)["n"].to_pylist() == [9, 10]
    assert in_delta(tmp_path) == listed(tmp_path)


def test_a_log_that_was_deleted_is_written_again(tmp_path: Path) -> None:
    begun(tmp_path, ROW)
    files = staged(tmp_path, rows(1))
    manifest.record(tmp_path, 1, add=files)
    shutil.rmtree(tmp_path / manifest.LOG)

    with pytest.raises(FileNotFoundError, match="_delta_log is missing"):
        manifest.read(tmp_path)
    one = files.replace_schema_metadata({"version": "1"})
    assert manifest.publish(tmp_path, one, known=manifest.known(tmp_path))

    assert in_delta(tmp_path) == listed(tmp_path) == files["path"].to_pylist()


def test_files_of_the_log_are_never_replaced(tmp_path: Path) -> None:
    """A reader that has listed a file reads the one that it has listed."""
    begun(tmp_path, ROW)
    seven = staged(tmp_path, rows(1)).replace_schema_metadata({"version": "7"})
    known = manifest.read(tmp_path)
    manifest.publish(tmp_path, seven, known=known)
    log = tmp_path / manifest.LOG
    before = {path.name: path.stat().st_ino for path in log.iterdir()}

    manifest.publish(tmp_path, seven, known=known)
    manifest.record(tmp_path, 7, add=staged(tmp_path, rows(2)))

    assert {path.name: path.stat().st_ino for path in log.iterdir()} == before


def test_versions_are_kept_by_their_number_not_by_gaps(tmp_path: Path) -> None:
    begun(tmp_path, ROW)
    file = staged(tmp_path, rows(1))
    for version in range(3, 30, 3):
        listed_now = file.replace_schema_metadata({"version": str(version)})
        manifest.publish(tmp_path, listed_now, known=manifest.read(tmp_path))

    assert in_delta(tmp_path, 3) == in_delta(tmp_path, 27) == listed(tmp_path)


def test_what_a_dead_publisher_left_is_deleted_after_an_hour(tmp_path: Path) -> None:
    begun(tmp_path, ROW)
    log = tmp_path / manifest.LOG
    old, new = log / f".{1:020}.json.abc.tmp", log / f".{1:020}.json.abd.tmp"
    old.touch()
    new.touch()
    os.utime(old, (1_000_000, 1_000_000))

    one = staged(tmp_path, rows(1)).replace_schema_metadata({"version": "1"})
    manifest.publish(tmp_path, one, known=manifest.read(tmp_path))

    assert not old.exists()
    assert new.exists()


def test_a_manifest_of_format_2_becomes_a_delta_table(tmp_path: Path) -> None:
    old = staged(tmp_path, rows(0, 1, 2))
    folder = of_format_2(tmp_path, old, version=8, remove=old["path"].to_pylist()[:1])

    before = manifest.read(tmp_path)
    assert not manifest.record(tmp_path, 9, add=staged(tmp_path, rows(3)))
    now = before.files.replace_schema_metadata({"version": "8"})
    manifest.publish(tmp_path, now, known=before)

    assert before.version == 8
    assert before.files["path"].to_pylist() == old["path"].to_pylist()[1:]
    assert manifest.read(tmp_path).version == deltalake.DeltaTable(tmp_path).version() == 8
    assert manifest.read(tmp_path).files.equals(before.files)
    assert sorted(pl.read_delta(str(tmp_path))["n"]) == [1, 2]
    assert not folder.exists()
    assert manifest.record(tmp_path, 9, add=staged(tmp_path, rows(3)))
    assert in_delta(tmp_path) == listed(tmp_path)


def test_columns_that_are_added_later_are_null_before(tmp_path: Path) -> None:
    begun(tmp_path, ROW)
    manifest.record(tmp_path, 1, add=staged(tmp_path, rows(1)), columns=ROW)
    wide = rows(2).append_column("tail", pa.array(["N1"]))

    manifest.record(tmp_path, 2, add=staged(tmp_path, wide))

    found = pl.read_delta(str(tmp_path)).sort("n")
    assert found["tail"].to_list() == [None, "N1"]
    assert found.columns == ["n", "born_at_ms", "hour", "tail"]


def test_a_wider_type_reads_the_files_before_it(tmp_path: Path) -> None:
    begun(tmp_path)
    narrow = rows(1).set_column(0, "n", pa.array([1], pa.int32()))
    manifest.record(tmp_path, 1, add=staged(tmp_path, narrow))
    manifest.record(tmp_path, 2, add=staged(tmp_path, rows(2**40 // HOUR_MS)))
    manifest.record(tmp_path, 3, add=staged(tmp_path, narrow))

    assert pl.read_delta(str(tmp_path)).schema["n"] == pl.Int64
    assert len(pl.read_delta(str(tmp_path))) == 3


def test_a_compaction_of_old_files_changes_no_column(tmp_path: Path) -> None:
    begun(tmp_path)
    nested = rows(1).append_column("s", pa.array([{"a": 1, "b": 2}]))
    manifest.record(tmp_path, 1, add=staged(tmp_path, nested))
    narrow = rows(1).append_column("s", pa.array([{"a": 1}]))

    old = listed(tmp_path)
    manifest.record(tmp_path, 2, add=staged(tmp_path, narrow), remove=old[:0], is_rearranged=True)

    assert [sorted(row) for row in pl.read_delta(str(tmp_path))["s"]] == [["a", "b"], ["a", "b"]]


@pytest.mark.parametrize(
    ("known", "new", "both"),
    [
        (pa.int32(), pa.int64(), "long"),
        (pa.int64(), pa.int16(), "long"),
        (pa.float64(), pa.float32(), "double"),
        (pa.decimal128(18, 2), pa.decimal128(9, 4), "decimal(20,4)"),
        (pa.decimal128(38, 0), pa.decimal128(38, 10), "decimal(38,10)"),
        (pa.timestamp("ms"), pa.timestamp("ms", "UTC"), "timestamp_ntz"),
        (pa.string(), pa.int64(), "long"),
        (
            pa.list_(pa.int32()),
            pa.list_(pa.int64()),
            {"type": "array", "elementType": "long", "containsNull": True},
        ),
    ],
    ids=str,
)
def test_a_type_reads_the_files_before_it_if_there_is_one(
    known: pa.DataType, new: pa.DataType, both: Any
) -> None:
    table = delta.Metadata("id", 1)
    for each in (known, new):
        table = table.with_columns(pa.schema([("value", each)]))

    assert table.fields[0]["type"] == both


def test_columns_that_differ_by_case_are_one_to_delta(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun(tmp_path)
    table = rows(1).append_column("N", pa.array([5], pa.int64()))

    manifest.record(tmp_path, 1, add=staged(tmp_path, table))

    assert "not in the Delta table column=N" in caplog.text
    assert deltalake.DeltaTable(tmp_path).schema().to_arrow().names == ["n", "born_at_ms", "hour"]


def test_a_size_that_the_broker_does_not_know_is_read_from_the_file(tmp_path: Path) -> None:
    begun(tmp_path, ROW)
    file = staged(tmp_path, rows(1))
    unknown = file.set_column(2, file.schema.field(2), pa.nulls(1, pa.int64()))

    manifest.record(tmp_path, 1, add=unknown)

    assert len(pl.read_delta(str(tmp_path))) == 1
    assert manifest.read(tmp_path).files.equals(file)


def test_a_column_named_hour_is_the_rows_own(tmp_path: Path) -> None:
    begun(tmp_path)
    table = rows(1, 2).append_column("Hour", pa.array([10, 20], pa.int64()))

    manifest.record(tmp_path, 1, add=staged(tmp_path, table))

    assert sorted(pl.read_delta(str(tmp_path))["Hour"]) == [10, 20]
    hours = manifest.read(tmp_path).files["partition"].to_pylist()
    assert hours == ["2013-01-01T06", "2013-01-01T07"]


def test_paths_and_ranges_are_the_same_after_a_checkpoint(tmp_path: Path) -> None:
    described: list[dict[str, Any]] = [
        {"path": "x:y/a b%20ü#?.parquet", "rows": None, "bytes": None, "partition": None,
         "offsets": None},
        {"path": "hour=x/c.parquet", "rows": 0, "bytes": 5, "partition": "x", "offsets": []},
        {"path": "d", "rows": 2, "bytes": 5, "partition": "x",
         "offsets": [{"queue_id": 0, "base": 1, "end": 2}, {"queue_id": 3, "base": 0, "end": 9}]},
    ]  # fmt: skip
    files = manifest.as_files(described)
    begun(tmp_path)
    manifest.record(tmp_path, 1, add=files)

    assert manifest.read(tmp_path).files.equals(files)
    for version in range(2, manifest.CHECKPOINT_VERSIONS + 3):
        manifest.record(tmp_path, version, add=files.slice(0, 0))

    assert any(path.name.endswith(".parquet") for path in (tmp_path / manifest.LOG).iterdir())
    assert manifest.read(tmp_path).files.equals(files)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([True, None]), [True, None]),
        (pa.array([1, None], pa.int8()), [1, None]),
        (pa.array([1, None], pa.uint8()), [1, None]),
        (pa.array([1, None], pa.uint16()), [1, None]),
        (pa.array([1, None], pa.uint32()), [1, None]),
        (pa.array([1.5, None], pa.float32()), [1.5, None]),
        (pa.array(["a", None], pa.large_string()), ["a", None]),
        (pa.array(["a", None]).dictionary_encode(), ["a", None]),
        (pa.array([b"a", None], pa.binary()), [b"a", None]),
        (pa.array([b"ab", None], pa.binary(2)), [b"ab", None]),
        (pa.array([1, None], pa.date32()), [dt.date(1970, 1, 2), None]),
        (pa.array([Decimal("1.50"), None], pa.decimal128(9, 2)), [Decimal("1.50"), None]),
        (pa.array([[1], None], pa.list_(pa.int64())), [[1], None]),
        (pa.array([{"a": 1}, None]), [{"a": 1}, None]),
        (
            pa.array([1000, None], pa.timestamp("ms")),
            [SECOND.replace(tzinfo=None), None],
        ),
        (
            pa.array([1000, None], pa.timestamp("ms", "UTC")),
            [SECOND, None],
        ),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_types_have_the_same_values(tmp_path: Path, column: pa.Array, expected: list[Any]) -> None:
    begun(tmp_path)
    table = rows(1, 1).append_column("value", column)

    manifest.record(tmp_path, 1, add=staged(tmp_path, table))

    assert pl.read_delta(str(tmp_path))["value"].to_list() == expected
    found = deltalake.DeltaTable(tmp_path).to_pyarrow_table()["value"]
    assert found.to_pylist() == expected


@pytest.mark.parametrize(
    "type_",
    [pa.timestamp("ns"), pa.time64("us"), pa.duration("ms"), pa.list_(pa.duration("s"))],
    ids=str,
)
def test_columns_without_a_delta_type_are_left_out(
    tmp_path: Path, type_: pa.DataType, caplog: pytest.LogCaptureFixture
) -> None:
    begun(tmp_path)

    table = rows(1).append_column("value", pa.nulls(1, type_))
    manifest.record(tmp_path, 1, add=staged(tmp_path, table))

    assert pl.read_delta(str(tmp_path)).columns == ["n", "born_at_ms", "hour"]
    assert readers.sink_table(tmp_path).column_names == ["n", "born_at_ms", "value"]
    assert "not in the Delta table column=value" in caplog.text


def test_other_writers_refuse_the_table(tmp_path: Path) -> None:
    begun(tmp_path, ROW)
    for version in (1, 2):
        manifest.record(tmp_path, version, add=staged(tmp_path, rows(0), batch=version))
    table, files = deltalake.DeltaTable(tmp_path), listed(tmp_path)

    with pytest.raises(CommitFailedError, match=delta.FEATURE):
        table.optimize.compact()
    with pytest.raises(CommitFailedError, match=delta.FEATURE):
        table.delete("n = 0")
    with pytest.raises(Exception, match=delta.FEATURE):
        deltalake.write_deltalake(tmp_path, rows(5), mode="append")

    assert listed(tmp_path) == files
    assert manifest.record(tmp_path, 3, add=staged(tmp_path, rows(1)))
    assert in_delta(tmp_path) == listed(tmp_path)


def test_a_compaction_changes_no_data(tmp_path: Path) -> None:
    begun(tmp_path, ROW)
    old = staged(tmp_path, rows(1))
    manifest.record(tmp_path, 1, add=old)

    paths = old["path"].to_pylist()
    manifest.record(tmp_path, 2, add=staged(tmp_path, rows(1)), remove=paths, is_rearranged=True)

    lines = (tmp_path / manifest.LOG / f"{2:020}.json").read_text().splitlines()
    actions = [json.loads(line) for line in lines]
    values = [each[name] for each in actions for name in each if name in ("add", "remove")]
    changes = [value["dataChange"] for value in values]
    assert changes == [False, False]
    assert deltalake.DeltaTable(tmp_path).history(1)[0]["operation"] == "OPTIMIZE"


def test_a_delta_reader_sees_whole_versions_while_they_are_written(tmp_path: Path) -> None:
    begun(tmp_path, ROW)
    before = staged(tmp_path, rows(0, 1))
    manifest.record(tmp_path, 1, add=before)
    done, seen = threading.Event(), list[int]()

    def look() -> None:
        while not done.is_set():
            table = deltalake.DeltaTable(tmp_path)
            numbers = sorted(pl.read_delta(table)["n"])
            assert numbers == [table.version() - 1, table.version()]
            seen.append(table.version())

    errors = list[BaseException]()
    reader = threading.Thread(target=catching(look, errors))
    reader.start()
    for version in range(2, 3 * manifest.CHECKPOINT_VERSIONS):
        after = staged(tmp_path, rows(version - 1, version))
        manifest.record(tmp_path, version, add=after, remove=before["path"].to_pylist())
        before = after
    done.set()
    reader.join()

    assert errors == []
    assert len(set(seen)) > 3


def catching(call: Any, errors: list[BaseException]) -> Any:
    def caught() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - the test asserts that there is none
            errors.append(error)

    return caught


def test_a_flipped_bit_of_a_commit_is_an_error_or_harmless(tmp_path: Path) -> None:
    begun(tmp_path, ROW)
    manifest.record(tmp_path, 1, add=staged(tmp_path, rows(1, 2)))
    path, right = tmp_path / manifest.LOG / f"{1:020}.json", manifest.read(tmp_path).files

    said = list[str]()
    for content in flipped(path.read_bytes()):
        path.write_bytes(content)
        try:
            assert manifest.read(tmp_path).files.equals(right)
        except durable_files.DamagedFileError as error:
            said.append(str(error))

    assert len(said) > len(path.read_bytes()) // 2
    assert all(str(path) in each for each in said)


def flipped(whole: bytes) -> Iterator[bytes]:
    for byte in range(len(whole)):
        content = bytearray(whole)
        content[byte] ^= 1 << byte % 8
        yield bytes(content)


def test_the_types_of_a_checkpoint_are_those_that_delta_readers_ask_for() -> None:
    table = delta.Metadata("id", 1).with_columns(ROW)
    files = manifest.as_files(
        [{"path": "a", "rows": 1, "bytes": 2, "partition": "h", "offsets": None}]
    )

    found = delta.checkpoint(files, at_ms=5, table=table)

    assert found.num_rows == 3
    assert pc.list_flatten(pc.struct_field(found["protocol"], "writerFeatures")).to_pylist() == [
        delta.FEATURE
    ]
    assert delta.files_in(found).equals(files)
