"""``rmq sql``."""

import io
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from tests.cli.conftest import Rmq

DOCUMENT = Path(__file__).parents[2] / "docs" / "sql.md"
#: What has arguments is no view: state as of a moment, and files_of.
VIEWS = [
    name
    for name in re.findall(r"^### `(\w+)`$", DOCUMENT.read_text(), re.MULTILINE)
    if not name.endswith("_at") and name != "files_of"
]
QUERY = "SELECT 1 AS n, 'it''s' AS t, [1, 2] AS l, NULL AS z, sum(x) AS s FROM range(4) AS r(x)"


def test_json(rmq: Rmq) -> None:
    want = [{"n": 1, "t": "it's", "l": [1, 2], "z": None, "s": 6}]

    assert rmq("sql", QUERY, "--format", "json").json == want
    assert rmq("sql", QUERY, "--json").json == want
    assert rmq("sql", "-", "--json", stdin=QUERY.encode()).json == want


def test_table(rmq: Rmq) -> None:
    told = rmq("sql", QUERY)

    header, row = told.text.splitlines()
    assert header.split() == ["n", "t", "l", "z", "s"]
    assert row.split() == ["1", "it's", "1,", "2", "-", "6"]
    assert rmq("sql", "SELECT 1 AS n WHERE false").text == "No rows.\n"


def test_csv(rmq: Rmq) -> None:
    table = csv.read_csv(io.BytesIO(rmq("sql", QUERY, "--format", "csv").out))

    assert table.column_names == ["n", "t", "l", "z", "s"]
    assert table["l"].to_pylist() == ["[1, 2]"]


def test_parquet(rmq: Rmq, tmp_path: Path) -> None:
    file = tmp_path / "answer.parquet"

    out = rmq("sql", QUERY, "--format", "parquet").out
    written = rmq("sql", QUERY, "--format", "parquet", "--output", str(file))

    assert pq.read_table(io.BytesIO(out))["l"].to_pylist() == [[1, 2]]
    assert written.out == b""
    assert pq.read_table(file)["t"].to_pylist() == ["it's"]


@pytest.mark.parametrize("view", VIEWS)
def test_every_documented_view_answers(rmq: Rmq, view: str) -> None:
    assert isinstance(rmq("sql", f"SELECT * FROM {view} LIMIT 3", "--json").json, list)


def test_help_names_every_documented_view(no_broker: Rmq) -> None:
    told = re.split(r"[^\w(]+", no_broker("sql", "--help").text)

    assert len(VIEWS) > 20
    assert [view for view in VIEWS if view not in told] == []


@pytest.mark.parametrize(
    "query", ["DROP TABLE x", "SELECT", "SELECT 1; SELECT 2", "SELECT * FROM read_text('/etc/a')"]
)
def test_only_one_select_is_answered(rmq: Rmq, query: str) -> None:
    told = rmq("sql", query)

    assert told.code == 1
    assert told.err.startswith("QueryError: ")


def test_a_query_has_a_time_limit(rmq: Rmq) -> None:
    endless = "SELECT count(*) FROM range(10000000000) a, range(1000) b WHERE a.range = b.range + 1"

    told = rmq("sql", endless, "--timeout", "0.2")

    assert told.code == 1
    assert "0.2 s" in told.err


def test_output_needs_a_format_for_files(rmq: Rmq, tmp_path: Path) -> None:
    assert rmq("sql", QUERY, "--output", str(tmp_path / "a")).code == 1
    told = rmq("sql", QUERY, "--format", "csv", "--output", "/nowhere/at.all")
    assert told.code == 1
    assert "/nowhere/at.all" in told.err
