import datetime as dt
import tracemalloc
from collections.abc import Callable
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


MIB = 1024 * 1024


def decimal(scale: int) -> pa.Array:
    """A decimal with the digit 1."""
    digits = pa.py_buffer((1).to_bytes(16, "little"))
    return pa.Array.from_buffers(pa.decimal128(38, scale), 1, [None, digits])


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
    ("sql", "values"),
    [
        ("SELECT $1,$2", [1, 2]),
        ("SELECT list_value($a,$b)[1], $b", [1, 2]),
        ("SELECT $1+0,$2-0", [1, 2]),
        ("SELECT $1,/* /* $9 */ ? */$2 -- ?", [1, 2]),
        ("SELECT ?,?::INT", [1, 2]),
        ("SELECT $1 AS a$9,$2 AS b", [1, 2]),
        ("SELECT $001,$0002", [1, 2]),
        ("SELECT $ä,$_2", [1, 2]),
        ("SELECT ? -- ?\r, ?", [1, 2]),
        (r"SELECT regexp_matches(e'it\'s ''?', '.')::INT * ?,(?)", [1, 2]),
        (r"SELECT length('\') * ?,?", [1, 2]),
        ("SELECT length($_a$ $1 $a$ ' $_a$) * 0 + $1,$2", [1, 2]),
    ],
)
def test_parameters_are_where_duckdb_has_them(sql: str, values: list[int]) -> None:
    names = Statement.parse(sql).parameters

    assert answer(bound(sql, **dict(zip(names, values, strict=True)))) == values
    assert len(names) == 2


@pytest.mark.parametrize("sql", ["SELECT ';'", 'SELECT 1 AS ";"', "SELECT 1;; -- ;"])
def test_only_semicolons_at_the_end_are_cut_off(sql: str) -> None:
    assert answer(Statement.parse(sql).text) == answer(sql)


def test_a_list_of_parameters_is_refused_before_it_is_read() -> None:
    sql = "SELECT [" + ",".join("?" * 64_000) + "]"

    with pytest.raises(QueryError, match="64000 parameters"):
        Statement.parse(sql)


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("", "empty"),
        (" ; -- nothing", "empty"),
        ("SELECT '\0'", "NUL"),
        ("SELECT 'a", "without an end"),
        ("SELECT /* /* */", "without an end"),
        ("SELECT $a$ $b$", "without an end"),
        ("SELECT ?, $a", "mixes"),
        ("SELECT $1000000000001", r"no parameter \$1"),
        ("SELECT $1001", r"no parameter \$1001"),
        ("SELECT $0000000000", r"no parameter \$0"),
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
        (pa.table({"a": decimal(-100)}), "decimal"),
        (pa.table({"a": decimal(2**31 - 1)}), "decimal"),
        (pa.table({"a": pa.array([1], pa.duration("s"))}), "duration"),
        (pa.table({"a": pa.array([1], pa.timestamp("ns"))}), "would lose data"),
        (pa.table({"a": pa.array([1], pa.timestamp("ns", "UTC"))}), "would lose data"),
        (pa.table({"a": pa.array([1], pa.time64("ns"))}), "would lose data"),
        (pa.table({"a": [[1]]}), "list<"),
        (pa.table({"a": [{"x": 1}]}), "struct<"),
        (pa.table({"a": ["a\0b"]}), "NUL"),
        (pa.table({"a": ["a" * limits.FLIGHT_SQL_CHARACTERS]}), "characters; the limit"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: pa.Table, why: str) -> None:
    with pytest.raises(QueryError, match=why):
        Statement.parse("SELECT ?").bind(values)


@pytest.mark.parametrize("sql", ["SELECT ?", "SELECT 1"])
def test_rows_of_parameters_are_explained(sql: str) -> None:
    with pytest.raises(QueryError, match=r"once for each row.*string_split"):
        Statement.parse(sql).bind(pa.table({"a": [1, 2]}))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (
            pa.array([5_000], pa.timestamp("ns")),
            dt.datetime(1970, 1, 1, 0, 0, 0, 5),  # noqa: DTZ001
        ),
        (pa.array(["a"]).dictionary_encode(), "a"),
        (
            pa.array([5], pa.timestamp("us")).dictionary_encode(),
            dt.datetime(1970, 1, 1, 0, 0, 0, 5),  # noqa: DTZ001
        ),
        (pa.array([None], pa.null()), None),
        (pa.array(["a"], pa.string_view()), "a"),
        (pa.array([Decimal(100)], pa.decimal128(5, -2)), 100),
    ],
)
def test_a_value_of_another_arrow_type_has_a_literal(value: pa.Array, found: Any) -> None:
    assert answer(bound_array("SELECT ?", value)) == [found]


def bound_array(sql: str, value: pa.Array) -> str:
    return Statement.parse(sql).bind(pa.table({"a": value}))


def peak_of(bind: Callable[[], object]) -> int:
    """The bytes that Python has for a refused binding at most, beyond those before it."""
    tracemalloc.start()
    try:
        with pytest.raises(QueryError):
            bind()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_long_value_at_many_places_is_refused_before_it_is_written() -> None:
    statement = Statement.parse("SELECT " + ", ".join(["$a"] * 1_000))
    values = pa.table({"a": ["a" * 100_000]})

    assert peak_of(lambda: statement.bind(values)) < MIB


@pytest.mark.parametrize("value", ["'" * 2 * MIB, b"a" * 2 * MIB], ids=["text", "bytes"])
def test_a_long_value_is_refused_before_it_grows(value: object) -> None:
    statement = Statement.parse("SELECT ?")
    values = pa.table({"a": [value]})

    assert peak_of(lambda: statement.bind(values)) < 3 * MIB


def test_a_list_of_nulls_is_refused_before_it_is_made() -> None:
    """It takes a few bytes on the wire, however long it is."""
    nulls = pa.ListArray.from_arrays(pa.array([0, 1_000_000], pa.int32()), pa.nulls(1_000_000))
    statement = Statement.parse("SELECT ?")
    values = pa.table({"a": nulls})

    assert peak_of(lambda: statement.bind(values)) < MIB


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
