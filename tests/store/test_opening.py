"""Tables and views are made when they are missing, or another version has made them."""

from pathlib import Path

import duckdb
import pytest

from rmq_pipeline.errors import HomeFormatError
from rmq_pipeline.limits import MIB
from rmq_pipeline.store import opening
from rmq_pipeline.store.database import Database


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


def test_only_files_from_before_a_new_column_are_known_to_lack_it(path: Path) -> None:
    _open_and_close(path)
    with duckdb.connect(path) as connection:
        connection.execute("DROP VIEW store.all_events CASCADE")
        connection.execute("ALTER TABLE store.events DROP COLUMN detail")
        connection.execute("UPDATE store.reached SET dispatched = 640")
        connection.execute("UPDATE store.made_by SET made_by = 'another'")

    _open_and_close(path)

    with duckdb.connect(path) as connection:
        assert connection.sql("SELECT columns_since FROM store.made_by").fetchall() == [(640,)]
