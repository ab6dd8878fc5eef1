"""Queries of functions that DuckDB interrupts are told from all others."""

import re
from collections.abc import Iterator

import duckdb
import pytest

from rmq_pipeline.store.query.interruptible import is_interruptible
from rmq_pipeline.store.statements import named, statements

MACROS = frozenset({"lag_at"})
LEVENSHTEIN = "levenshtein(a, b)"


@pytest.fixture(scope="module")
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as made:
        yield made


@pytest.mark.parametrize(
    "query",
    [
        "FROM lag WHERE lag > 3 ORDER BY ALL",
        "SELECT l.* FROM range(epoch_ms(now()), 9, 60) AS m(t), LATERAL (FROM lag_at(m.t)) AS l",
        "SELECT detail ->> '$.a', detail -> 'b', count(*) FILTER (x), x[1], {'a': 1}, [1] FROM e",
        "SELECT sum(x) OVER (PARTITION BY y ORDER BY z) FROM a JOIN b USING (c) UNION SELECT 2",
        "SELECT x::DECIMAL(3, 1), CAST(y AS TIMESTAMPTZ), x LIKE 'a%', x IN (SELECT 1) FROM t",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n",
        "SELECT strftime(make_timestamp(1000 * at_ms), '%H'), now() - INTERVAL 3 DAY FROM events",
        "SELECT list_contains(keys, '42'), quantile_disc(x, 0.5), row_number() OVER () FROM m",
    ],
)
def test_known_functions_are(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    assert is_interruptible(connection, query, macros=MACROS)


@pytest.mark.parametrize("name", [name for name in statements() if name.startswith("cli_")])
def test_the_command_line_needs_no_process(
    connection: duckdb.DuckDBPyConnection, name: str
) -> None:
    query = re.sub(r"\$\w+", "'x'", named(name))

    assert is_interruptible(connection, query, macros=MACROS | {"files_of"})


@pytest.mark.parametrize(
    "query",
    [
        "SELECT replace(a, 'b', 'c') FROM t",
        "SELECT printf('%*d', 2000000000, 1)",
        "SELECT repeat('a', 3)",
        "SELECT list_reduce(l, lambda x, y: x) FROM t",
        "SELECT range(10)",
        "SELECT a LIKE b FROM t",
        "SELECT detail ->> path FROM t",
        "SELECT detail ->> '$.*' FROM t",
        "SELECT digits::BIGNUM FROM t",
        "SELECT a COLLATE nocase FROM t",
        f"SELECT '{'a' * 5_000}'",
        "SELECT quantile(x, 0.5) OVER (ORDER BY y) FROM t",
        "WITH a AS NOT MATERIALIZED (SELECT 1) FROM a",
        "SELECT count(*) FROM " + "(SELECT *, * FROM " * 9 + "t" + ")" * 9,
        "SELECT 1 GROUP BY CUBE (a, b, c, d, e, f, g)",
        "SUMMARIZE t",
        "no query",
    ],
)
def test_all_else_is_not(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    assert not is_interruptible(connection, query, macros=MACROS)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT {}",
        "FROM range({})",
        "FROM lag_at({})",
        "FROM t LIMIT {}",
        "SELECT 1 ORDER BY {}",
        "SELECT sum(x ORDER BY {}) FROM t",
        "SELECT sum(x) FILTER ({} > 1) FROM t",
        "SELECT count(*) OVER (ORDER BY {}) FROM t",
        "FROM t JOIN u ON {} = 1",
        "VALUES ({})",
        "WITH w AS (SELECT {}) SELECT 1",
        "SELECT DISTINCT ON ({}) 1",
        "SELECT * REPLACE ({} AS a) FROM t",
        "SELECT 1 GROUP BY {}",
        "SELECT 1 HAVING {} > 1",
        "SELECT 1 QUALIFY {} > 1",
        "SELECT (SELECT {})",
        "SELECT 1 IN (1, {})",
        "SELECT CASE WHEN a THEN {} END FROM t",
        "SELECT x[{}] FROM t",
    ],
)
def test_a_function_is_found_wherever_it_is(
    connection: duckdb.DuckDBPyConnection, query: str
) -> None:
    assert is_interruptible(connection, query.format("length(a)"), macros=MACROS)
    assert not is_interruptible(connection, query.format(LEVENSHTEIN), macros=MACROS)
