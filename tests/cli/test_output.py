"""Moments and errors as people read them; SQL with values in their places."""

from decimal import Decimal

import pytest

from rmq_pipeline.cli.moments import format_ms, parse_ms
from rmq_pipeline.cli.output import print_json, show_error
from rmq_pipeline.cli.statements import literal, statement
from rmq_pipeline.errors import QueryError, RequestError


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("0", 0),
        ("1767225600000", 1_767_225_600_000),
        ("2026-01-01T00:00:00Z", 1_767_225_600_000),
        ("2026-01-01T01:00:00.250+01:00", 1_767_225_600_250),
        ("2026-01-01 00:00:00+00:00", 1_767_225_600_000),
    ],
)
def test_a_moment_is_iso_or_ms(text: str, ms: int) -> None:
    assert parse_ms(text) == ms


@pytest.mark.parametrize("text", ["", "soon", "-5", "1.5", "2026-13-01"])
def test_anything_else_is_no_moment(text: str) -> None:
    with pytest.raises(RequestError, match="is no time"):
        parse_ms(text)


def test_a_moment_is_shown_to_the_millisecond() -> None:
    assert format_ms(1_767_225_600_007) == "2026-01-01T00:00:00.007Z"
    assert format_ms(1 << 62) == str(1 << 62)
    assert parse_ms(format_ms(1_767_225_600_007)) == 1_767_225_600_007


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(QueryError("Parser Error:\n  near [b]"), as_json=False)

    assert capsys.readouterr().err == (
        "QueryError: Parser Error: near [b]. Give one SELECT over the documented views.\n"
    )


def test_numbers_of_sql_are_numbers_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json([Decimal(5), Decimal("1.5"), b"\xff", (1, None)])

    assert capsys.readouterr().out.split() == [
        *("[", "5,", "1.5,", '"/w==",', "[", "1,", "null", "]", "]")
    ]


def test_values_become_literals() -> None:
    assert [literal(value) for value in ("it's", 5, None)] == ["'it''s'", "5", "NULL"]
    query = statement("cli_trace", message_id="a\n' OR 1 = 1 --")
    assert "'a\n'' OR 1 = 1 --'" in query
    assert "--" not in query.replace("1 --'", "")
    assert ";" not in query
