"""What a SQL92 filter means, rule by rule (semantics §10)."""

from __future__ import annotations

import pyarrow as pa
import pytest

from rmq_pipeline import errors, limits, schema
from rmq_pipeline.filter import expression
from rmq_pipeline.filter.expression import compile_filter

Properties = dict[str, str]


def is_wanted(condition: str, **properties: str) -> bool:
    """Whether a message with these properties is."""
    return wanted(condition, properties)[0]


def wanted(condition: str, *rows: Properties) -> list[bool]:
    values = [list(row.items()) for row in rows]
    fields = {"tag": pa.nulls(len(rows), pa.string()), "properties": pa.array(values, PROPERTIES)}
    messages = pa.table(fields).append_column("keys", pa.nulls(len(rows), schema.KEYS))
    found: list[bool] = compile_filter(condition, "sql92").matches(messages).to_pylist()
    return found


PROPERTIES = schema.PROPERTIES

# ----------------------------------------------------------------------------------- the tokens


@pytest.mark.parametrize(
    "condition",
    [
        "a = 5 and b = 'x'",
        "a = 5 AnD b = 'x'",
        "a=5\tAND\r\n b\f='x'",
        "a = 5 -- five\n AND b = 'x' -- and no line after this",
        "/* a * b ** / */ a = 5 AND /**/ b = 'x'",
        "(((a = 5))) AND (b) = ('x')",
        "a = 5L AND a = 5l",
        "a = 5.0 AND a = 5. AND a = .5E1 AND a = 50e-1",
        "a = +5 AND a <> -5 AND a > - - 4",
        "b IN ('y', 'x')",
        "a NOT IN ('x') AND a NOT BETWEEN 6 AND 9",
    ],
)
def test_an_expression_may_be_written_in_any_of_its_forms(condition: str) -> None:
    assert is_wanted(condition, a="5", b="x")


def test_two_quotes_are_one_in_a_text() -> None:
    assert wanted("a = 'it''s'", {"a": "it's"}, {"a": "it''s"}, {"a": "its"}) == [
        True,
        False,
        False,
    ]


def test_names_of_properties_keep_their_case_and_may_have_a_dollar() -> None:
    assert is_wanted("_a$1 = 'x' AND A IS NULL", **{"_a$1": "x", "a": "y"})


def test_and_binds_before_or() -> None:
    rows = [{"a": a, "b": b, "c": c} for a in "01" for b in "01" for c in "01"]

    found = wanted("a = 1 OR b = 1 AND c = 1", *rows)

    assert found == [r["a"] == "1" or (r["b"] == "1" and r["c"] == "1") for r in rows]


# --------------------------------------------------------------------------- three-valued logic


@pytest.mark.parametrize("condition", ["missing = 'v'", "'v' = missing", "missing <> 'v'"])
def test_a_missing_property_equals_nothing_and_differs_from_nothing(condition: str) -> None:
    assert not is_wanted(condition, a="v")
    assert not is_wanted(f"NOT ({condition})", a="v")


def test_the_order_of_operands_does_not_matter() -> None:
    # In RocketMQ 'v' <> missing is true.
    assert not is_wanted("'v' <> missing", a="v")
    assert not is_wanted("missing = other", a="v")


@pytest.mark.parametrize(
    "condition",
    ["m > 1", "m BETWEEN 1 AND 2", "m NOT BETWEEN 1 AND 2", "m IN ('x')", "m NOT IN ('x')", "m"],
)
def test_what_is_asked_of_a_missing_property_is_unknown(condition: str) -> None:
    assert not is_wanted(condition, a="v")
    assert not is_wanted(f"NOT ({condition})", a="v")
    assert is_wanted(f"({condition}) IS NULL", a="v")


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("m = 1 AND a = 1", False),
        ("m = 1 AND a = 2", False),
        ("NOT (m = 1 AND a = 2)", True),
        ("NOT (m = 1 AND a = 1)", False),
        ("m = 1 OR a = 1", True),
        ("m = 1 OR a = 2", False),
        ("NOT (m = 1 OR a = 2)", False),
        ("NOT (NULL)", False),
        ("NULL OR TRUE", True),
        ("TRUE", True),
        ("FALSE", False),
    ],
)
def test_unknown_goes_through_and_or_and_not(condition: str, expected: bool) -> None:
    assert is_wanted(condition, a="1") is expected


def test_is_null_is_never_unknown() -> None:
    rows: list[Properties] = [{"a": ""}, {}]

    assert wanted("a IS NULL", *rows) == [False, True]
    assert wanted("a IS NOT NULL", *rows) == [True, False]
    assert wanted("NOT (a IS NULL)", *rows) == [True, False]


# ------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6", True),
        ("+6", True),
        ("006", True),
        ("5", False),
        ("-6", False),
        ("6.0", False),
        ("6e0", False),
        ("0x6", False),
        (" 6", False),
        ("six", False),
        ("", False),
        ("3000000000", True),
        ("9223372036854775807", True),
        ("9223372036854775808", False),
    ],
)
def test_a_text_is_read_as_a_whole_number_next_to_a_whole_number(text: str, expected: bool) -> None:
    assert is_wanted("a > 5", a=text) is expected
    assert is_wanted("5 < a", a=text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3.5", True),
        ("3", False),
        ("4", True),
        ("4.", True),
        (".4E1", True),
        ("1e400", True),
        ("NaN", False),
        ("Infinity", False),
        ("4f", False),
        ("0x4", False),
        ("", False),
    ],
)
def test_a_text_is_read_as_a_decimal_next_to_a_decimal(text: str, expected: bool) -> None:
    assert is_wanted("a > 3.0", a=text) is expected


def test_a_decimal_text_is_no_whole_number() -> None:
    assert not is_wanted("a = 3", a="3.5")
    assert not is_wanted("a <> 3", a="3.5")
    assert is_wanted("a <> 3.0", a="3.5")


def test_two_texts_are_equal_letter_by_letter() -> None:
    assert is_wanted("a = b", a="5", b="5")
    assert not is_wanted("a = b", a="5", b="5.0")
    assert not is_wanted("a = '5.0'", a="5")


def test_two_texts_are_ordered_as_decimals() -> None:
    assert is_wanted("a > b", a="10", b="9.5")
    assert not is_wanted("a > b", a="b", b="a")
    assert not is_wanted("a > b", a="10")


def test_a_text_is_read_as_a_boolean_next_to_a_boolean() -> None:
    rows = [{"a": "true"}, {"a": "TRUE"}, {"a": "false"}, {"a": "yes"}, {"b": "true"}]

    assert wanted("a = TRUE", *rows) == [True, True, False, False, False]
    assert wanted("FALSE = a", *rows) == [False, False, True, False, False]
    assert wanted("a", *rows) == [True, True, False, False, False]
    assert wanted("NOT a", *rows) == [False, False, True, False, False]


def test_a_text_that_cannot_be_read_ends_the_evaluation_and_is_not_wanted() -> None:
    assert not is_wanted("a > 5", a="x")
    assert not is_wanted("NOT (a > 5)", a="x")
    assert not is_wanted("(a > 5) IS NULL", a="x")
    assert not is_wanted("a > 5 OR b = 1", a="x", b="1")


def test_and_and_or_go_from_left_to_right_and_stop_when_they_know() -> None:
    assert is_wanted("b = 1 OR a > 5", a="x", b="1")
    assert is_wanted("NOT (b = 2 AND a > 5)", a="x", b="1")
    assert not is_wanted("NOT (a > 5 AND b = 2)", a="x", b="1")


# ---------------------------------------------------------------------------------- predicates


def test_between_has_both_its_limits() -> None:
    rows = [{"a": str(n)} for n in range(6)]

    assert wanted("a BETWEEN 2 AND 4", *rows) == [False, False, True, True, True, False]
    assert wanted("a NOT BETWEEN 2 AND 4", *rows) == [True, True, False, False, False, True]
    assert wanted("3 BETWEEN a AND 4", *rows) == [True, True, True, True, False, False]


def test_in_compares_texts() -> None:
    rows = [{"a": "1"}, {"a": "01"}, {"a": ""}, {}]

    assert wanted("a IN ('1', '')", *rows) == [True, False, True, False]
    assert wanted("a NOT IN ('1', '')", *rows) == [False, True, False, False]


@pytest.mark.parametrize(
    ("how", "part", "expected"),
    [
        ("CONTAINS", "es", [True, True, False]),
        ("STARTSWITH", "we", [True, True, False]),
        ("ENDSWITH", "t", [True, False, True]),
        ("CONTAINS", ".", [False, False, False]),
    ],
)
def test_a_part_of_a_text_is_found_as_it_is_written(
    how: str, part: str, expected: list[bool]
) -> None:
    rows = [{"a": "west"}, {"a": "western"}, {"a": "East"}]

    assert wanted(f"a {how} '{part}'", *rows) == expected
    assert wanted(f"a NOT {how} '{part}'", *rows) == [not found for found in expected]


@pytest.mark.parametrize("how", ["CONTAINS", "STARTSWITH", "ENDSWITH"])
@pytest.mark.parametrize("negated", ["", "NOT "])
def test_an_empty_part_and_a_missing_text_are_false_even_with_not(how: str, negated: str) -> None:
    assert not is_wanted(f"a {negated}{how} ''", a="x")
    assert not is_wanted(f"m {negated}{how} 'x'", a="x")
    assert not is_wanted(f"5 {negated}{how} 'x'", a="x")
    # False, and not unknown: NOT around it turns it.
    assert is_wanted(f"NOT (m {negated}{how} 'x')", a="x")


# -------------------------------------------------------------------------------------- errors

BAD = {
    "an order of a text": ("a > 'x'", 5),
    "an order of a boolean": ("a >= TRUE", 6),
    "an order of a condition": ("(a = 1) < 2", 2),
    "two orders": ("1 < a < 5", 1),
    "limits that are texts": ("a BETWEEN 'a' AND 'b'", 11),
    "limits the wrong way round": ("a BETWEEN 5 AND 1.5", 3),
    "a number that is IN": ("5 IN ('5')", 3),
    "a text that is IN": ("'x' IN ('x')", 5),
    "a number among texts": ("a IN ('5', 5)", 12),
    "no member": ("a IN ()", 7),
    "a part that is no text": ("a CONTAINS 5", 12),
    "a value alone": ("'x'", 1),
    "a number beside a condition": ("(a = 1) = 5", 9),
    "NULL as a value": ("a = NULL", 5),
    "IS of a value": ("a IS 5", 6),
    "a sign of a property": ("-a > 5", 1),
    "a number of over 64 bits": ("a = 9223372036854775808", 5),
    "a decimal without end": ("a = 1e999", 5),
    "arithmetic": ("a = 5 * 2", 7),
    "another not equal": ("a != 5", 3),
    "double quotes": ('a = "x"', 5),
    "an open bracket": ("(a = 1", 7),
    "a bracket too many": ("a = 1)", 6),
    "an open text": ("a = 'it''s", 5),
    "an open comment": ("a = 1 /* x", 7),
    "two values": ("a b", 3),
    "the end": ("a = 1 AND", 10),
    "NOT before a comparison": ("NOT a = 1", 1),
    "NOT before a list": ("NOT a IS NULL", 1),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_parse_is_refused_with_its_place(case: str) -> None:
    condition, at = BAD[case]

    with pytest.raises(errors.FilterExpressionError, match=f"at character {at}:") as refused:
        compile_filter(condition, "sql92")

    _, shown, caret, *_ = refused.value.message.splitlines()
    assert shown == f"  {condition}"
    assert caret == "  " + " " * (at - 1) + "^"
    assert refused.value.remedy != errors.RequestError.remedy


def test_a_long_expression_is_shown_around_the_place() -> None:
    condition = "a = 1 AND " * 500 + "b = = AND " + "a = 1 AND " * 200 + "TRUE"

    with pytest.raises(errors.FilterExpressionError) as refused:
        compile_filter(condition, "sql92")

    _, shown, caret, *_ = refused.value.message.splitlines()
    assert len(shown) < 130
    assert shown[caret.index("^") :].startswith("= AND")


@pytest.mark.parametrize("condition", ["", "  ", "-- nothing", "/* nothing */"])
def test_nothing_is_no_filter(condition: str) -> None:
    with pytest.raises(errors.FilterExpressionError, match="at least one condition"):
        compile_filter(condition, "sql92")


@pytest.mark.parametrize(
    "condition",
    [
        "(" * limits.FILTER_DEPTH * 2 + "a = 1" + ")" * limits.FILTER_DEPTH * 2,
        "NOT " * limits.FILTER_DEPTH * 2 + "a",
        "a" + " IS NULL" * limits.FILTER_DEPTH * 2,
        "a = 1" + " = TRUE" * limits.FILTER_DEPTH * 2,
    ],
)
def test_what_is_nested_too_deep_is_refused(condition: str) -> None:
    with pytest.raises(errors.FilterExpressionError, match="nested deeper"):
        compile_filter(condition, "sql92")


def test_hundreds_of_conditions_are_taken() -> None:
    many = " OR ".join(f"(a = {n})" for n in range(500))

    assert wanted(many, {"a": "499"}, {"a": "500"}) == [True, False]


# ------------------------------------------------------------------------------------ compiled


def test_an_expression_is_compiled_once_while_it_is_among_the_last_hundred() -> None:
    expression._compiled.cache_clear()
    first = compile_filter("a = 0", "sql92")

    for n in range(1, 100):
        compile_filter(f"a = {n}", "sql92")
    kept = compile_filter("a = 0", "sql92")
    for n in range(100, 200):
        compile_filter(f"a = {n}", "sql92")
    again = compile_filter("a = 0", "sql92")

    assert expression.KEPT == 100
    assert kept is first
    assert again is not first
    assert again == first


def test_only_the_columns_that_are_asked_for_are_looked_at() -> None:
    messages = pa.table({"tag": ["t", None]})

    assert compile_filter("TAGS = 't'", "sql92").matches(messages).to_pylist() == [True, False]
    assert compile_filter("TAGS = 't' OR a = 1", "sql92").columns == ("tag", "properties")
    assert compile_filter("TRUE", "sql92").columns == ()


# ---------------------------------------------------------------------------------------- tags


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("*", [True, True, True]),
        ("", [True, True, True]),
        ("a", [True, False, False]),
        (" a || b ||", [True, True, False]),
        ("a || *", [True, True, True]),
        ("A", [False, False, False]),
    ],
)
def test_a_tag_filter_wants_any_of_its_tags(condition: str, expected: list[bool]) -> None:
    messages = pa.table({"tag": pa.chunked_array([["a"], ["b", None]])})

    assert compile_filter(condition).matches(messages).to_pylist() == expected


@pytest.mark.parametrize("condition", ["||", " || ", "a | b", "a\nb"])
def test_tags_that_no_message_can_have_are_refused(condition: str) -> None:
    with pytest.raises(errors.FilterExpressionError):
        compile_filter(condition)
