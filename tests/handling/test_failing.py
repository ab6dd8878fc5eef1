"""What a handler raises fails its message, whatever it is; what ends the run gets through."""

from __future__ import annotations

from typing import NoReturn

import dagster as dg
import pyarrow as pa
import pytest

from rmq_pipeline import limits
from rmq_pipeline.handling.group_walk import Rules, walk
from rmq_pipeline.handling.handler import Outcome
from rmq_pipeline.handling.results import REASON_LENGTH, Failure
from tests.handling.test_group_walk import exceptions, messages


class MuteError(Exception):
    """Cannot be told."""

    def __str__(self) -> str:
        raise RuntimeError("nor can this")


class PanicException(BaseException):
    """Descends from no Exception."""


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(
    ("error", "reason", "error_type"),
    [
        (ValueError("no \udcff here"), "ValueError: no \\udcff here", "ValueError"),
        (MuteError(), "MuteError: ", "MuteError"),
        (PanicException("out of bounds"), "PanicException: out of bounds", "PanicException"),
        (SystemExit(3), "SystemExit: 3", "SystemExit"),
    ],
)
def test_whatever_is_raised_fails_its_message(
    error: BaseException, reason: str, error_type: str, *, ordered: bool
) -> None:
    def raising(*_: pa.Table) -> NoReturn:
        raise error

    walked = walk(messages(("a", "1")), None, rules=Rules(raising, ordered=ordered))

    assert exceptions(walked) == [(0, "retry", None, reason, error_type)]


def test_a_long_reason_is_cut() -> None:
    said = Failure.of(ValueError("\ud800" * REASON_LENGTH)).reason

    assert said.startswith("ValueError: \\ud800\\ud800")
    assert len(said) == REASON_LENGTH


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(
    "ending",
    [
        KeyboardInterrupt,
        dg.DagsterExecutionInterruptedError,
        type("OfOurs", (KeyboardInterrupt,), {}),
    ],
)
def test_what_ends_the_run_gets_through(ending: type[BaseException], *, ordered: bool) -> None:
    def raising(*_: pa.Table) -> NoReturn:
        raise ending

    with pytest.raises(ending):
        walk(messages(("a", "1")), None, rules=Rules(raising, ordered=ordered))


def test_a_traceback_begins_with_the_handler_and_names_its_line() -> None:
    def handler(messages: pa.Table, state: pa.Table) -> Outcome:  # noqa: ARG001
        carriers: dict[str, str] = {}
        carriers["carrier"]
        return Outcome()

    walked = walk(messages((None, "0")), None, rules=Rules(handler, ordered=False))

    (where,) = walked.exceptions["traceback"].to_pylist()
    assert where.startswith("Traceback (most recent call last):\n")
    assert 'carriers["carrier"]' in where
    assert where.endswith("KeyError: 'carrier'")
    assert "group_walk" not in where


def test_of_messages_that_fail_alike_the_first_one_has_the_traceback() -> None:
    def handler(messages: pa.Table, state: pa.Table) -> Outcome:  # noqa: ARG001
        body = int(messages["body"][0].as_py())
        raise (ValueError if body % 2 else KeyError)(f"number {body}")

    walked = walk(
        messages(*((None, str(n)) for n in range(6))), None, rules=Rules(handler, ordered=False)
    )

    has = [where is not None for where in walked.exceptions["traceback"].to_pylist()]
    assert has == [True, True, False, False, False, False]


def test_a_long_traceback_keeps_its_end() -> None:
    said = Failure.of(ValueError("x" * 5_000 + "!")).traceback()

    assert len(said) == limits.TRACEBACK_LENGTH
    assert said.startswith("…x")
    assert said.endswith("x!")
