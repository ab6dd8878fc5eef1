"""A sink is one table to pyarrow, pandas, DuckDB and Spark, by its manifest."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pytest

from rmq_pipeline import checked_parquet
from rmq_pipeline.handling import sink
from rmq_pipeline.lake import manifest, readers

if TYPE_CHECKING:
    from pathlib import Path

HOUR_MS = 3_600_000
FIVE_MS = 1_357_016_400_000
FIVE, SIX = "2013-01-01T05", "2013-01-01T06"
ROW = pa.schema([("n", pa.int64()), ("born_at_ms", pa.int64())])


def stage(folder: Path, *numbers: int) -> pa.Table:
    """A row a number, an hour a number."""
    times = [FIVE_MS + n * HOUR_MS for n in numbers]
    table = pa.table([list(numbers), times], schema=ROW)
    return sink.stage(folder, table, partition_time="born_at_ms", epoch=1, batch=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What counts: 0 and 1; staged beside it: 0 and 2."""
    counting = stage(tmp_path, 0, 1)
    stage(tmp_path, 0, 2)
    listed = counting.replace_schema_metadata({"version": "1"})
    manifest.publish(tmp_path, listed, known=manifest.NOTHING)
    return tmp_path


def test_pyarrow_and_pandas(folder: Path) -> None:
    table = readers.sink_table(folder)

    assert table.schema == ROW
    assert table.to_pandas()["n"].tolist() == [0, 1]
    assert readers.sink_table(folder, columns=["n"], partitions=[SIX]).to_pylist() == [{"n": 1}]


def test_files_are_read_concurrently_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = stage(tmp_path, *range(4)).replace_schema_metadata({"version": "1"})
    manifest.publish(tmp_path, listed, known=manifest.NOTHING)
    together, read = threading.Barrier(4, timeout=10), checked_parquet.read

    def slow(path: str | Path, **options: Any) -> pa.Table:
        if "hour=" in str(path):
            together.wait()
        return read(path, **options)

    monkeypatch.setattr(checked_parquet, "read", slow)

    assert readers.sink_table(tmp_path)["n"].to_pylist() == [0, 1, 2, 3]


def test_duckdb(folder: Path) -> None:
    with duckdb.connect() as connection:
        rows = readers.duckdb_relation(connection, folder)
        of_hour = readers.duckdb_relation(connection, folder, partitions=[FIVE])

        assert rows.columns == ROW.names
        assert rows.order("n").fetchall() == [(0, FIVE_MS), (1, FIVE_MS + HOUR_MS)]
        assert of_hour.fetchall() == [(0, FIVE_MS)]


def test_paths_for_any_other_reader(folder: Path) -> None:
    (path,) = readers.sink_paths(str(folder), partitions=[SIX])

    with duckdb.connect() as connection:
        assert connection.sql(f"SELECT n FROM '{path}'").fetchall() == [(1,)]


def test_an_empty_sink_has_the_columns_that_are_given(tmp_path: Path) -> None:
    with duckdb.connect() as connection:
        assert readers.duckdb_relation(connection, tmp_path, sink_schema=ROW).columns == ROW.names
        with pytest.raises(ValueError, match="sink_schema"):
            readers.duckdb_relation(connection, tmp_path)
    assert readers.sink_table(tmp_path, sink_schema=ROW).schema == ROW


def test_a_column_that_came_later_is_null_before(tmp_path: Path) -> None:
    old = stage(tmp_path, 0)
    wider = pa.table([[1], [FIVE_MS], ["x"]], names=["n", "born_at_ms", "note"])
    new = sink.stage(tmp_path, wider, partition_time="born_at_ms", epoch=1, batch=0)
    listed = pa.concat_tables([old, new]).replace_schema_metadata({"version": "1"})
    manifest.publish(tmp_path, listed, known=manifest.NOTHING)

    with duckdb.connect() as connection:
        relation = readers.duckdb_relation(connection, tmp_path)
        assert relation.project("n, note").order("n").fetchall() == [(0, None), (1, "x")]
    assert readers.sink_table(tmp_path)["note"].to_pylist() == [None, "x"]
