import datetime as dt
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmq_pipeline import limits
from rmq_pipeline.errors import ForbiddenError, QueryError, RequestError
from rmq_pipeline.flight.sql_statement import Handles, Statement

DUCKDB = duckdb.connect()
VALUES = [
    *(None, True, False, 0, -3, 2**62, 0.1, -1e300, float("inf"), float("nan")),
    *("", "it's", "a ? $1 -- /*", "日本\n", b"", b"a\x00'\xff", Decimal("-1.50")),
    *(dt.date(2026, 3, 7), dt.time(2, 3, 4, 5)),
    dt.datetime(2026, 3, 7, 2, 0, 0, 5),  # noqa: DTZ001 - a time without a zone
    dt.datetime(2026, 3, 7, 2, tzinfo=dt.UTC),
]


def bound(sql: str, **values: Any) -> str:
    return Statement.parse(sql).bind(pa.table({name: [value] for name, value in values.items()}))


def answer(sql: str) -> list[Any]:
    (row,) = DUCKDB.sql(sql).to_arrow_table().to_pylist()
    return list(row.values())


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_from_duckdb_as_it_was_bound(value: Any) -> None:
    (found,) = answer(bound("SELECT ?", a=value))

    assert repr(found) == repr(value) or found == value


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_text_is_one_literal(text: str) -> None:
    assert answer(bound("SELECT ?, 'end'", a=text)) == [text, "end"]


def test_only_parameters_are_replaced() -> None:
    sql = """SELECT '?' AS "a?", $$ ? $1 $$ /* ? */, -?, ?::INT -- ?
    , [?] ;"""

    filled = bound(sql, a=-1, b="2", c=3)

    assert answer(filled) == ["?", " ? $1 ", 1, 2, [3]]


def test_numbers_and_names_have_their_values_in_place() -> None:
    assert answer(bound("SELECT $2 a, $1 b, $2 c", a=1, b=2)) == [2, 1, 2]
    assert answer(bound("SELECT $b a, $a b, $b c", a=1, b=2)) == [2, 1, 2]
    assert answer(bound("SELECT $b a, $a b, $b c", x=1, y=2)) == [1, 2, 1]


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("", "empty"),
        (" ; -- nothing", "empty"),
        ("SELECT '\0'", "NUL"),
        ("SELECT 'a", "without an end"),
        ("SELECT ?, $a", "mixes"),
        ("SELECT $0", r"no parameter \$0"),
        ("SELECT $99999999999999999999", r"no parameter \$9"),
        ("SELECT " + ", ".join("?" * 1001), "1001 parameters"),
        ("SELECT '" + "a" * limits.FLIGHT_SQL_CHARACTERS + "'", "characters; the limit"),
    ],
)
def test_a_text_that_is_no_statement_is_refused(sql: str, why: str) -> None:
    with pytest.raises(QueryError, match=why):
        Statement.parse(sql)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (pa.table({"a": [1], "b": [2]}), "2 values"),
        (pa.table({}), "0 rows"),
        (pa.table({"a": [1, 2]}), "2 rows"),
        (pa.table({"a": [[1]]}), "list<"),
        (pa.table({"a": [{"x": 1}]}), "struct<"),
        (pa.table({"a": ["a\0b"]}), "NUL"),
        (pa.table({"a": ["a" * limits.FLIGHT_SQL_CHARACTERS]}), "characters; the limit"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: pa.Table, why: str) -> None:
    with pytest.raises(QueryError, match=why):
        Statement.parse("SELECT ?").bind(values)


def test_a_statement_with_parameters_needs_values() -> None:
    statement = Statement.parse("SELECT ? a, ? b")

    with pytest.raises(QueryError, match="2 parameters without values"):
        statement.check_bound()
    assert answer(statement.without_values()) == [None, None]


# ------------------------------------------------------------------------------------- handles


def test_a_handle_opens_for_its_kind_and_caller_until_it_expires() -> None:
    now_s = 5.0
    handles = Handles(lambda: now_s)
    handle = handles.seal("ticket", "SELECT 'ä'", caller="ann")

    assert handles.open("ticket", handle, caller="ann").text == "SELECT 'ä'"
    with pytest.raises(ForbiddenError, match="another user"):
        handles.open("ticket", handle, caller="bob")
    with pytest.raises(RequestError, match="not a prepared statement"):
        handles.open("prepared statement", handle, caller="ann")
    now_s += limits.FLIGHT_SQL_HANDLE_MS / 1000
    with pytest.raises(RequestError, match="expired"):
        handles.open("ticket", handle, caller="ann")


def test_a_handle_that_was_changed_is_refused() -> None:
    handles = Handles()
    handle = handles.seal("ticket", "SELECT 1", caller="ann")

    for at in range(len(handle)):
        changed = bytearray(handle)
        changed[at] ^= 1
        with pytest.raises(RequestError, match="not a ticket"):
            handles.open("ticket", bytes(changed), caller="ann")
    for short in (b"", handle[:31], handle[:40]):
        with pytest.raises(RequestError, match="not a ticket"):
            handles.open("ticket", short, caller="ann")
    with pytest.raises(RequestError, match="restart"):
        Handles().open("ticket", handle, caller="ann")
