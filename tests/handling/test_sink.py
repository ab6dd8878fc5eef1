"""Sinks: rows are staged in files of their hour, and what no settle named goes again."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rmq_pipeline import schema
from rmq_pipeline.handling import sink

if TYPE_CHECKING:
    from pathlib import Path

HOUR_MS = 3_600_000
#: 2013-01-01T05:15 UTC.
FIVE_MS = 1_357_017_300_000
NONE = schema.SINK_FILE.empty_table()


def rows(*times_ms: int) -> pa.Table:
    return pa.table({"n": list(range(len(times_ms))), "born_at_ms": pa.array(times_ms, pa.int64())})


def stage(folder: Path, table: pa.Table, *, epoch: int = 1, batch: int = 0) -> pa.Table:
    return sink.stage(folder, table, partition_time="born_at_ms", epoch=epoch, batch=batch)


def test_rows_go_to_the_hour_of_their_partition_time(tmp_path: Path) -> None:
    files = stage(tmp_path, rows(FIVE_MS, FIVE_MS + HOUR_MS, FIVE_MS + 1, -1), epoch=7, batch=12)

    by_partition = {f["partition"]: f for f in files.to_pylist()}
    assert {p: f["rows"] for p, f in by_partition.items()} == {
        "1969-12-31T23": 1,
        "2013-01-01T05": 2,
        "2013-01-01T06": 1,
    }
    five = by_partition["2013-01-01T05"]
    assert five["path"].startswith("hour=2013-01-01T05/part-000007-000012-")
    with pq.ParquetFile(tmp_path / five["path"]) as file:
        assert file.read()["n"].to_pylist() == [0, 2]
    assert five["bytes"] == (tmp_path / five["path"]).stat().st_size
    assert five["offsets"] is None


def test_a_partition_time_may_be_a_timestamp(tmp_path: Path) -> None:
    at = pa.array([FIVE_MS * 1000], pa.timestamp("us", tz="UTC"))

    files = stage(tmp_path, pa.table({"born_at_ms": at}))

    assert files["partition"].to_pylist() == ["2013-01-01T05"]


def test_files_whose_folder_was_deleted_are_not_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def delete_folder(handle: int) -> None:
        fsync(handle)
        if list(tmp_path.glob("hour=*/*.parquet")):
            shutil.rmtree(tmp_path / "hour=2013-01-01T05")

    monkeypatch.setattr(os, "fsync", delete_folder)

    with pytest.raises(FileNotFoundError):
        stage(tmp_path, rows(FIVE_MS))


def messages(*places: tuple[int, int]) -> pa.Table:
    queue_id, offset = zip(*places, strict=True)
    return pa.table({"queue_id": pa.array(queue_id, pa.int32()), "queue_offset": offset})


def test_a_file_says_where_the_messages_of_its_rows_lie(tmp_path: Path) -> None:
    given = messages((1, 7), (0, 3), (1, 9))

    (file,) = sink.stage(
        tmp_path,
        rows(FIVE_MS),
        partition_time="born_at_ms",
        epoch=1,
        batch=0,
        messages=given,
    ).to_pylist()

    assert file["offsets"] == [
        {"queue_id": 0, "base": 3, "end": 4},
        {"queue_id": 1, "base": 7, "end": 10},
    ]


def test_rows_that_name_their_messages_say_it_for_each_file(tmp_path: Path) -> None:
    given = messages((0, 3), (0, 8))
    table = rows(FIVE_MS, FIVE_MS + HOUR_MS)
    for name in sink.OFFSETS:
        table = table.append_column(name, given[name])

    files = sink.stage(
        tmp_path, table, partition_time="born_at_ms", epoch=1, batch=0, messages=given
    )

    assert files["offsets"].to_pylist() == [
        [{"queue_id": 0, "base": 3, "end": 4}],
        [{"queue_id": 0, "base": 8, "end": 9}],
    ]


def test_unnamed_files_of_older_epochs_are_deleted(tmp_path: Path) -> None:
    named = stage(tmp_path, rows(FIVE_MS), epoch=1)
    replaced = stage(tmp_path, rows(FIVE_MS), epoch=1)
    dead = stage(tmp_path, rows(FIVE_MS, FIVE_MS + HOUR_MS), epoch=2)
    current = stage(tmp_path, rows(FIVE_MS), epoch=3)
    merging = sink.stage(
        tmp_path, rows(FIVE_MS), partition_time="born_at_ms", epoch=0, batch=0, prefix="merged"
    )
    others = tmp_path / "hour=2013-01-01T05" / "notes.txt"
    others.write_text("not ours")

    kept = replaced["path"].to_pylist()
    deleted = sink.delete_unnamed(tmp_path, named, epoch=3, kept=kept)

    assert sorted(deleted) == sorted(dead["path"].to_pylist())
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {
        *named["path"].to_pylist(),
        *kept,
        *current["path"].to_pylist(),
        *merging["path"].to_pylist(),
        str(others.relative_to(tmp_path)),
    }


def test_staged_files_count_once_the_manifest_names_them(tmp_path: Path) -> None:
    first = stage(tmp_path, rows(FIVE_MS))
    second = stage(tmp_path, rows(FIVE_MS, FIVE_MS))
    assert sink.read_sink(tmp_path, sink_schema=first.schema).num_rows == 0

    sink.publish_manifest(tmp_path, second)

    assert sink.sink_files(tmp_path).equals(second)
    read = sink.read_sink(tmp_path)
    assert (read.num_rows, read.column_names) == (2, ["n", "born_at_ms"])
    assert sink.read_sink(tmp_path, columns=["n"]).column_names == ["n"]


def test_an_older_list_of_the_broker_changes_nothing(tmp_path: Path) -> None:
    first, second = stage(tmp_path, rows(FIVE_MS)), stage(tmp_path, rows(FIVE_MS))
    sink.publish_manifest(tmp_path, second.replace_schema_metadata({"version": "2"}))

    sink.publish_manifest(tmp_path, first.replace_schema_metadata({"version": "1"}))
    again = sink.sink_files(tmp_path)
    sink.publish_manifest(tmp_path, first)

    assert again.equals(second)
    assert sink.sink_files(tmp_path).equals(first)


def test_a_sink_without_a_manifest_is_empty(tmp_path: Path) -> None:
    wanted = pa.schema([("n", pa.int64())])

    assert sink.read_sink(tmp_path, sink_schema=wanted).equals(wanted.empty_table())
    assert sink.sink_files(tmp_path).equals(NONE)
