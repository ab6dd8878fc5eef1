"""What a SQL92 condition means, rule by rule, for those who receive and for those who read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from rmq_pipeline import errors, limits

if TYPE_CHECKING:
    from tests.behaviour.conftest import Endpoint, Make

Row = dict[str, str]
#: ``wanted(condition, row, …)``: which of the messages with these properties are given.
Wanted = Callable[..., list[bool]]

SQL: dict[str, Any] = {"filter_type": "sql92"}


@pytest.fixture
def endpoint(shared_endpoint: Endpoint) -> Endpoint:
    return shared_endpoint


@pytest.fixture
def wanted(endpoint: Endpoint, topic: Make, group: Make, messages: Make) -> Wanted:
    def ask(condition: str, *rows: Row, **columns: Any) -> list[bool]:
        name, readers = topic(queues=1), group()
        endpoint.broker.send(name, messages(len(rows), properties=list(rows), **columns))
        received = endpoint.broker.receive(readers, name, filter=condition, **SQL)
        read = endpoint.broker.read(name, 0, offset=0, limit=100, filter=condition, **SQL)
        assert received["queue_offset"].equals(read["queue_offset"])
        return [i in received["queue_offset"].to_pylist() for i in range(len(rows))]

    return ask


def refusal(
    endpoint: Endpoint, topic: str, group: str, condition: str
) -> errors.FilterExpressionError:
    with pytest.raises(errors.FilterExpressionError) as refused:
        endpoint.broker.receive(group, topic, filter=condition, **SQL)
    return refused.value


# ------------------------------------------------------------------------------ how it is written


@pytest.mark.parametrize(
    "condition",
    [
        "a = 5 and not (b <> 'x')",
        "A IS NULL aNd a BeTwEeN 5 aNd 6 aNd b iN ('x') Or fAlSe",
        "b contains 'x' and b startswith 'x' and b endswith 'x' and TRUE is not null",
    ],
)
def test_keywords_are_taken_in_any_case(wanted: Wanted, condition: str) -> None:
    assert wanted(condition, {"a": "5", "b": "x"}) == [True]


@pytest.mark.parametrize(
    "condition", ["a = 5 -- AND FALSE\n AND b = 'x' -- the end", "/* a * 'b' ** / */ a = 5 /**/"]
)
def test_comments_are_passed_over(wanted: Wanted, condition: str) -> None:
    assert wanted(condition, {"a": "5", "b": "x"}) == [True]


def test_whole_numbers_may_have_an_l_and_decimals_an_exponent(wanted: Wanted) -> None:
    five = ("a = 5L AND a = 5l AND a = +5 AND a > -5", "a = 5.0 AND a = .5E1 AND a = 50e-1")

    assert [wanted(condition, {"a": "5"}) for condition in five] == [[True], [True]]


def test_two_quotes_are_one_in_a_text(wanted: Wanted) -> None:
    assert wanted("a = 'it''s'", {"a": "it's"}, {"a": "it''s"}) == [True, False]


def test_names_of_properties_keep_their_case_and_may_have_a_dollar(wanted: Wanted) -> None:
    assert wanted("_a$1 = 'x' AND A IS NULL", {"_a$1": "x", "a": "y"}) == [True]


def test_and_binds_before_or(wanted: Wanted) -> None:
    rows = [{"a": a, "b": b, "c": c} for a in "01" for b in "01" for c in "01"]

    found = wanted("a = 1 OR b = 1 AND c = 1", *rows)

    assert found == [r["a"] == "1" or (r["b"] == "1" and r["c"] == "1") for r in rows]


def test_tag_keys_id_and_message_group_are_properties_too(
    endpoint: Endpoint, topic: Make, messages: Make
) -> None:
    name = topic(type="fifo", queues=1)
    columns = {"tag": "t", "keys": [["k", "l"]], "message_id": "m-0", "message_group": "g"}
    endpoint.broker.send(name, messages(1, **columns))

    for condition in (
        "TAGS = 't'",
        "KEYS = 'k l' AND KEYS CONTAINS 'l'",
        "UNIQ_KEY = 'm-0'",
        "__SHARDINGKEY = 'g'",
    ):
        got = endpoint.broker.read(name, 0, offset=0, limit=1, filter=condition, **SQL)
        assert got.num_rows == 1, condition


# ----------------------------------------------------------------------------- three-valued logic


@pytest.mark.parametrize(
    "condition", ["m = 'v'", "'v' = m", "m <> 'v'", "'v' <> m", "m = n", "m <> n"]
)
def test_a_missing_property_equals_nothing_and_differs_from_nothing(
    wanted: Wanted, condition: str
) -> None:
    assert wanted(condition, {"a": "v"}) == [False]
    assert wanted(f"NOT ({condition})", {"a": "v"}) == [False]


@pytest.mark.parametrize(
    "condition",
    ["m > 1", "m BETWEEN 1 AND 2", "m NOT BETWEEN 1 AND 2", "m IN ('x')", "m NOT IN ('x')", "m"],
)
def test_what_is_asked_of_a_missing_property_is_unknown(wanted: Wanted, condition: str) -> None:
    assert wanted(condition, {"a": "v"}) == [False]
    assert wanted(f"NOT ({condition})", {"a": "v"}) == [False]
    assert wanted(f"({condition}) IS NULL", {"a": "v"}) == [True]


def test_is_null_is_never_unknown(wanted: Wanted) -> None:
    rows: list[Row] = [{"a": ""}, {}]

    assert wanted("a IS NULL", *rows) == [False, True]
    assert wanted("a IS NOT NULL", *rows) == [True, False]
    assert wanted("NOT (a IS NULL)", *rows) == [True, False]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("m = 1 AND a = 1", False),
        ("NOT (m = 1 AND a = 2)", True),
        ("NOT (m = 1 AND a = 1)", False),
        ("m = 1 OR a = 1", True),
        ("NOT (m = 1 OR a = 2)", False),
        ("NULL OR TRUE", True),
        ("NOT (NULL)", False),
    ],
)
def test_only_what_a_condition_is_true_for_is_given(
    wanted: Wanted, condition: str, expected: bool
) -> None:
    assert wanted(condition, {"a": "1"}) == [expected]


def test_and_and_or_go_from_left_to_right_and_stop_when_they_know(wanted: Wanted) -> None:
    row = {"a": "x", "b": "1"}

    assert wanted("b = 1 OR a > 5", row) == [True]
    assert wanted("NOT (b = 2 AND a > 5)", row) == [True]
    assert wanted("a > 5 OR b = 1", row) == [False]


# ------------------------------------------------------------------------------------------ texts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("6", True), ("+6", True), ("006", True), ("5", False), ("-6", False), ("6.0", False)),
        *((" 6", False), ("six", False), ("", False), ("9223372036854775807", True)),
        ("9223372036854775808", False),
    ],
)
def test_compared_with_a_whole_number_a_text_is_read_as_one(
    wanted: Wanted, text: str, expected: bool
) -> None:
    assert wanted("a > 5", {"a": text}) == [expected]
    assert wanted("5 < a", {"a": text}) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3.5", True), ("3", False), ("4", True), (".4E1", True), ("NaN", False), ("4f", False)],
)
def test_compared_with_a_decimal_a_text_is_read_as_one(
    wanted: Wanted, text: str, expected: bool
) -> None:
    assert wanted("a > 3.0", {"a": text}) == [expected]


def test_compared_with_a_boolean_a_text_is_read_as_one(wanted: Wanted) -> None:
    rows = [{"a": "true"}, {"a": "TRUE"}, {"a": "false"}, {"a": "yes"}, {"b": "true"}]

    assert wanted("a = TRUE", *rows) == [True, True, False, False, False]
    assert wanted("FALSE = a", *rows) == [False, False, True, False, False]
    assert wanted("a", *rows) == [True, True, False, False, False]
    assert wanted("NOT a", *rows) == [False, False, True, False, False]


@pytest.mark.parametrize("condition", ["a > 5", "NOT (a > 5)", "(a > 5) IS NULL", "a = 3"])
def test_a_text_that_cannot_be_read_is_not_given_whatever_is_around_it(
    wanted: Wanted, condition: str
) -> None:
    assert wanted(condition, {"a": "3.5"}) == [False]


def test_two_texts_are_equal_letter_by_letter_and_ordered_as_decimals(wanted: Wanted) -> None:
    rows = [{"a": "5", "b": "5"}, {"a": "5", "b": "5.0"}, {"a": "10", "b": "9.5"}]

    assert wanted("a = b", *rows) == [True, False, False]
    assert wanted("a <> b", *rows) == [False, True, True]
    assert wanted("a > b", *rows) == [False, False, True]
    assert wanted("a > b", {"a": "b", "b": "a"}) == [False]


# ------------------------------------------------------------------------------------- predicates


def test_between_has_both_its_limits(wanted: Wanted) -> None:
    rows = [{"a": str(n)} for n in range(6)]

    assert wanted("a BETWEEN 2 AND 4", *rows) == [False, False, True, True, True, False]
    assert wanted("a NOT BETWEEN 2 AND 4", *rows) == [True, True, False, False, False, True]


def test_in_compares_texts(wanted: Wanted) -> None:
    rows: list[Row] = [{"a": "1"}, {"a": "01"}, {"a": ""}, {}]

    assert wanted("a IN ('1', '')", *rows) == [True, False, True, False]
    assert wanted("a NOT IN ('1', '')", *rows) == [False, True, False, False]


@pytest.mark.parametrize(
    ("how", "part", "expected"),
    [
        ("CONTAINS", "es", [True, True, False]),
        ("STARTSWITH", "we", [True, True, False]),
        ("ENDSWITH", "t", [True, False, True]),
    ],
)
def test_a_part_of_a_text_is_found(
    wanted: Wanted, how: str, part: str, expected: list[bool]
) -> None:
    rows = [{"a": "west"}, {"a": "western"}, {"a": "East"}]

    assert wanted(f"a {how} '{part}'", *rows) == expected
    assert wanted(f"a NOT {how} '{part}'", *rows) == [not found for found in expected]


@pytest.mark.parametrize("how", ["CONTAINS", "STARTSWITH", "ENDSWITH"])
@pytest.mark.parametrize("negated", ["", "NOT "])
def test_an_empty_part_a_missing_text_and_no_text_are_false_even_with_not(
    wanted: Wanted, how: str, negated: str
) -> None:
    row = {"a": "x"}

    assert wanted(f"a {negated}{how} ''", row) == [False]
    assert wanted(f"m {negated}{how} 'x'", row) == [False]
    assert wanted(f"5 {negated}{how} 'x'", row) == [False]
    assert wanted(f"NOT (m {negated}{how} 'x')", row) == [True]


# ---------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "condition",
    [
        *("a > 'x'", "a >= TRUE", "(a = 1) < 2", "1 < a < 5"),
        *("a BETWEEN 'a' AND 'b'", "a BETWEEN 5 AND 1", "a IN (5)", "5 IN ('5')", "a IN ()"),
        *("a CONTAINS 5", "'x'", "5", "a = NULL", "-a > 5", "1 = TRUE", "NOT a = 1"),
        *("a != 5", 'a = "x"', "a = 9223372036854775808", "(a = 1", "a = 'x", "/* a = 1"),
    ],
)
def test_what_is_no_condition_is_refused(
    endpoint: Endpoint, topic: Make, group: Make, condition: str
) -> None:
    assert "^" in refusal(endpoint, topic(), group(), condition).message


@pytest.mark.parametrize("condition", ["", "  ", "-- nothing", "/* nothing */"])
def test_an_empty_condition_is_refused(
    endpoint: Endpoint, topic: Make, group: Make, condition: str
) -> None:
    assert "at least one condition" in refusal(endpoint, topic(), group(), condition).message


def test_a_condition_has_at_most_8192_characters_and_64_levels(
    endpoint: Endpoint, wanted: Wanted, topic: Make, group: Make
) -> None:
    assert (limits.FILTER_LENGTH, limits.FILTER_DEPTH) == (8_192, 64)
    longest = "a = 1" + " " * (8_192 - 5)
    deep = "(" * 60 + "a = 1" + ")" * 60

    assert wanted(longest, {"a": "1"}) == wanted(deep, {"a": "1"}) == [True]
    assert "characters" in refusal(endpoint, topic(), group(), longest + " ").message
    too_deep = "(" * 65 + "a = 1" + ")" * 65
    assert "nested deeper" in refusal(endpoint, topic(), group(), too_deep).message
