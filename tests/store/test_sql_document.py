"""docs/sql.md describes every view and macro that a query may read, and no other."""

import re
from pathlib import Path

import pytest

from rmq_pipeline.errors import QueryError
from rmq_pipeline.store.database import Database
from rmq_pipeline.store.statements import named
from tests.store.conftest import OpenDatabase

DOCUMENT = (Path(__file__).parents[2] / "docs" / "sql.md").read_text()
#: The name of each, and the columns in the paragraph below it.
SECTIONS = dict(re.findall(r"^### `(\w+)`\n\n((?:[^\n]+\n)+)", DOCUMENT, re.MULTILINE))


@pytest.fixture
def database(open_database: OpenDatabase) -> Database:
    return open_database()


def test_every_view_and_macro_is_described_and_no_other(database: Database) -> None:
    views = [name for (name,) in database._root.sql(named("view_names")).fetchall()]

    assert sorted(SECTIONS) == sorted([*views, *database._queries.macros])


def test_the_macros_of_the_script_are_those_that_the_database_has(database: Database) -> None:
    made = database._root.sql(
        "SELECT DISTINCT function_name, parameters[1] FROM duckdb_functions() WHERE schema_name ="
        " 'main' AND function_type = 'table_macro' AND NOT internal"
    )

    assert dict(made.fetchall()) == database._queries.macros


def test_their_columns_are_named_in_order(database: Database) -> None:
    for name, listed in SECTIONS.items():
        query = f"SELECT * FROM {name}" + ("('0')" if name in database._queries.macros else "")

        answer = database.query(query, timeout_s=30)

        assert re.findall(r"`(\w+)`", listed) == answer.column_names, name


def test_a_macro_has_the_columns_of_its_view(database: Database) -> None:
    of_moments = [name for name in database._queries.macros if name.endswith("_at")]

    for name in of_moments:
        view = database.query(f"SELECT * FROM {name.removesuffix('_at')}", timeout_s=30)
        macro = database.query(f"SELECT * FROM {name}(0)", timeout_s=30)
        assert macro.schema == view.schema, name
    assert len(of_moments) == 9


def test_the_examples_are_queries(database: Database) -> None:
    examples = [
        query.strip()
        for block in re.findall(r"```sql\n(.*?)```", DOCUMENT, re.DOTALL)
        for query in block.split(";")
        if query.strip()
    ]

    for query in examples:
        assert database.query(query, timeout_s=30).num_columns
    assert len(examples) == 2


@pytest.mark.parametrize("moment", ["'yesterday'", "NULL", "-1"])
def test_a_moment_that_is_none_is_refused(database: Database, moment: str) -> None:
    for name in (name for name in database._queries.macros if name.endswith("_at")):
        with pytest.raises(QueryError, match=r"A moment is|The kept history begins at 0"):
            database.query(f"FROM {name}({moment})", timeout_s=30)
