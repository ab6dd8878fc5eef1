"""Tables and views are made when they are missing, or another version has made them."""

from contextlib import closing
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from rmq_pipeline import checked_parquet, schema
from rmq_pipeline.errors import HomeFormatError
from rmq_pipeline.limits import MIB
from rmq_pipeline.store import history, opening
from rmq_pipeline.store.database import Database
from rmq_pipeline.store.events import Kind
from tests.store.rows import dispatch, event, events


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a database that is made from nothing."""
    path = tmp_path / "state.duckdb"
    with duckdb.connect(path):
        pass  # exists, and is empty
    return path


def _open_and_close(path: Path) -> None:
    Database.open(path, memory_bytes=64 * MIB).close()


def _views(path: Path) -> dict[str, str]:
    with duckdb.connect(path) as connection:
        found = connection.sql("SELECT view_name, sql FROM duckdb_views() WHERE NOT internal")
        return dict(found.fetchall())


def test_what_this_version_made_is_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _open_and_close(path)
    assert {"lag", "in_flight", "message_trace"} <= set(_views(path))

    monkeypatch.setattr(opening, "make", None)

    _open_and_close(path)


def test_views_of_another_version_are_replaced(path: Path) -> None:
    _open_and_close(path)
    before = _views(path)
    with duckdb.connect(path) as connection:
        connection.execute("CREATE OR REPLACE VIEW main.lag AS SELECT 1 AS old")
        connection.execute("UPDATE store.made_by SET made_by = 'another'")

    _open_and_close(path)

    assert _views(path) == before


def test_a_version_that_did_not_say_so_is_another(path: Path) -> None:
    _open_and_close(path)
    with duckdb.connect(path) as connection:
        connection.execute("DROP TABLE store.made_by")
        connection.execute("DROP VIEW main.lag")

    _open_and_close(path)

    assert "lag" in _views(path)


def test_files_of_no_history_are_made_again(path: Path) -> None:
    _open_and_close(path)
    for file in path.parent.glob("*/.nothing.parquet"):
        file.unlink()

    _open_and_close(path)

    assert len(list(path.parent.glob("*/.nothing.parquet"))) == 2


def test_columns_that_older_homes_lack_are_added(path: Path) -> None:
    _open_and_close(path)
    with duckdb.connect(path) as connection:
        connection.execute("ALTER TABLE store.deleted_names DROP COLUMN detail")
        connection.execute("INSERT INTO store.deleted_names VALUES (NULL, 7, 'gone', 1, 2)")
        connection.execute("UPDATE store.made_by SET made_by = 'another'")

    _open_and_close(path)

    with duckdb.connect(path) as connection:
        found = connection.sql("SELECT name, detail FROM store.deleted_names").fetchall()
    assert found == [("gone", None)]


def test_columns_that_this_version_does_not_know_are_refused(path: Path) -> None:
    _open_and_close(path)
    with duckdb.connect(path) as connection:
        connection.execute("ALTER TABLE store.cursors ADD COLUMN newer VARCHAR")
        connection.execute("UPDATE store.made_by SET made_by = 'a newer one'")

    with pytest.raises(HomeFormatError, match=r"cursors .* other columns"):
        _open_and_close(path)


def _write_older_file(path: Path) -> None:
    """A file of events that was written before events had a detail."""
    names = [field.name for field in schema.EVENT if field.name != "detail"]
    columns = pa.schema([("position", pa.int64()), ("row", pa.int32())])
    older = pa.schema([*columns, *(schema.EVENT.field(name) for name in names)])
    path.parent.mkdir(exist_ok=True)
    checked_parquet.write(older.empty_table(), path)


def _columns_since(path: Path) -> int:
    with duckdb.connect(path) as connection:
        [(since,)] = connection.sql("SELECT columns_since FROM store.made_by").fetchall()
    return int(since)


def test_only_files_from_before_a_new_column_are_known_to_lack_it(path: Path) -> None:
    _open_and_close(path)
    assert _columns_since(path) == 0
    with duckdb.connect(path) as connection:
        connection.execute("UPDATE store.reached SET dispatched = 640")
        connection.execute("UPDATE store.made_by SET made_by = 'another'")
    _open_and_close(path)
    assert _columns_since(path) == 0
    with duckdb.connect(path) as connection:
        connection.execute("DROP VIEW store.all_events CASCADE")
        connection.execute("ALTER TABLE store.events DROP COLUMN detail")
        connection.execute("UPDATE store.made_by SET made_by = 'another'")
    _write_older_file(path.parent / history.EVENTS / "0-640.parquet")

    _open_and_close(path)

    # A snapshot of position 640 may have been written, and not yet registered.
    assert _columns_since(path) == 641


def test_older_files_are_read_by_name_when_the_database_is_made_again(path: Path) -> None:
    _write_older_file(path.parent / history.EVENTS / "0-640.parquet")

    database = Database.open(path, memory_bytes=64 * MIB)
    registered = {"path": "events/0-640.parquet", "from_position": 320, "to_position": 640}
    dispatch(database, [events(event(Kind.EVENT_SEGMENT, detail={**registered, "rows": 0}))])

    with closing(database):
        found = database.query("SELECT detail FROM events", timeout_s=10.0)
    assert found.num_rows == 0


def test_a_folder_that_looks_like_a_partition_gives_no_column(tmp_path: Path) -> None:
    for name in ("kind=prod", "row=a"):
        path = tmp_path / name / "state.duckdb"
        path.parent.mkdir()
        with closing(Database.open(path, memory_bytes=64 * MIB)) as database:
            events = database.query("SELECT * FROM events", timeout_s=10.0)
            leases = database.query("SELECT * FROM in_flight_at(0)", timeout_s=10.0)
        assert (events.num_rows, leases.num_rows) == (0, 0)
