"""Sinks: staged files count only once they are named, and readers go by the manifest."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rmq_pipeline import schema
from rmq_pipeline.spark import sink

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


def test_a_partition_time_may_be_a_timestamp(tmp_path: Path) -> None:
    at = pa.array([FIVE_MS * 1000], pa.timestamp("us", tz="UTC"))

    files = stage(tmp_path, pa.table({"born_at_ms": at}))

    assert files["partition"].to_pylist() == ["2013-01-01T05"]


def test_staged_files_count_once_the_manifest_names_them(tmp_path: Path) -> None:
    first = stage(tmp_path, rows(FIVE_MS))
    second = stage(tmp_path, rows(FIVE_MS, FIVE_MS))
    assert sink.read_sink(tmp_path, sink_schema=first.schema).num_rows == 0

    sink.publish_manifest(tmp_path, second)

    assert sink.sink_files(tmp_path).equals(second)
    read = sink.read_sink(tmp_path)
    assert (read.num_rows, read.column_names) == (2, ["n", "born_at_ms"])
    assert sink.read_sink(tmp_path, columns=["n"]).column_names == ["n"]


def test_publishing_again_changes_nothing(tmp_path: Path) -> None:
    files = stage(tmp_path, rows(FIVE_MS))
    sink.publish_manifest(tmp_path, files)
    before = (tmp_path / sink.MANIFEST).read_bytes()

    sink.publish_manifest(tmp_path, files)

    assert (tmp_path / sink.MANIFEST).read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [sink.MANIFEST]


def test_unnamed_files_of_older_epochs_are_deleted(tmp_path: Path) -> None:
    named = stage(tmp_path, rows(FIVE_MS), epoch=1)
    dead = stage(tmp_path, rows(FIVE_MS, FIVE_MS + HOUR_MS), epoch=2)
    current = stage(tmp_path, rows(FIVE_MS), epoch=3)
    (tmp_path / f"{sink.MANIFEST}.abc.tmp").write_text("half")
    others = tmp_path / "hour=2013-01-01T05" / "notes.txt"
    others.write_text("not ours")

    deleted = sink.delete_unnamed(tmp_path, named, epoch=3)

    assert sorted(deleted) == sorted(dead["path"].to_pylist())
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {
        *named["path"].to_pylist(),
        *current["path"].to_pylist(),
        str(others.relative_to(tmp_path)),
    }


def test_files_of_a_refused_batch_go_unless_a_settle_named_them(tmp_path: Path) -> None:
    refused = stage(tmp_path, rows(FIVE_MS))
    settled_after_all = stage(tmp_path, rows(FIVE_MS))

    sink.delete_staged(
        tmp_path, pa.concat_tables([refused, settled_after_all]), files=settled_after_all
    )

    assert not (tmp_path / refused["path"][0].as_py()).exists()
    assert (tmp_path / settled_after_all["path"][0].as_py()).exists()


def test_a_sink_without_a_manifest_is_empty(tmp_path: Path) -> None:
    wanted = pa.schema([("n", pa.int64())])

    assert sink.read_sink(tmp_path, sink_schema=wanted).equals(wanted.empty_table())
    assert sink.sink_files(tmp_path).equals(NONE)


def test_a_manifest_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / sink.MANIFEST).write_text(json.dumps({"format": 99, "files": []}))

    with pytest.raises(ValueError, match="newer version"):
        sink.sink_files(tmp_path)
