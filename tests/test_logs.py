"""Log records show their fields, as a line for people or as a JSON object."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rmq_pipeline import logs
from rmq_pipeline.errors import RequestError
from rmq_pipeline.logs import HumanFormatter, JsonFormatter

#: What a process does that another one has started.
STARTED = """
import logging
from rmq_pipeline import logs
logs.set_up(default="error")
logging.getLogger("rmq_pipeline").info("hello", extra={"who": "you"})
"""


@pytest.fixture
def record() -> logging.LogRecord:
    record = logging.makeLogRecord(
        {"name": "rmq_pipeline.x", "levelname": "WARNING", "msg": "restarting %s", "args": ("it",)}
    )
    record.created = 1_700_000_000.25
    record.child, record.exit_code, record.why = "daemon", -9, "two words"
    return record


def with_error(record: logging.LogRecord) -> logging.LogRecord:
    try:
        raise ValueError("no such table")
    except ValueError:
        record.exc_info = sys.exc_info()
    return record


def test_a_line_shows_the_fields(record: logging.LogRecord) -> None:
    line = HumanFormatter().format(record)

    said = "2023-11-14T22:13:20.250Z WARNING rmq_pipeline.x: restarting it"
    assert line == f'{said} child=daemon exit_code=-9 why="two words"'


def test_a_traceback_follows_the_fields(record: logging.LogRecord) -> None:
    first, *rest = HumanFormatter().format(with_error(record)).splitlines()

    assert first.endswith('why="two words"')
    assert rest[-1] == "ValueError: no such table"


def test_json_has_the_fields_and_the_traceback_in_one_line(record: logging.LogRecord) -> None:
    line = JsonFormatter().format(with_error(record))
    said = json.loads(line)

    assert "\n" not in line
    assert said.pop("error").endswith("ValueError: no such table")
    assert said == {
        "at": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "logger": "rmq_pipeline.x",
        "message": "restarting it",
        "child": "daemon",
        "exit_code": -9,
        "why": "two words",
    }


def test_a_field_does_not_hide_what_the_record_says(record: logging.LogRecord) -> None:
    record.level = "mine"

    assert json.loads(JsonFormatter().format(record))["level"] == "warning"


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The loggers of this process are put back."""
    monkeypatch.delenv(logs.LEVEL_VARIABLE, raising=False)
    monkeypatch.delenv(logs.FORMAT_VARIABLE, raising=False)
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    os.environ.pop(logs.LEVEL_VARIABLE, None)
    os.environ.pop(logs.FORMAT_VARIABLE, None)


@pytest.mark.usefixtures("untouched")
def test_what_was_chosen_holds_for_the_processes_that_are_started() -> None:
    logs.set_up("info", "json")

    command = [sys.executable, "-c", STARTED]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr

    assert json.loads(said)["who"] == "you"


@pytest.mark.usefixtures("untouched")
def test_loggers_of_others_are_left_alone() -> None:
    other = logging.getLogger("uvicorn.test")
    handler = logging.NullHandler()
    other.addHandler(handler)
    other.setLevel(logging.CRITICAL)

    logs.set_up("debug")

    assert (other.handlers, other.level) == ([handler], logging.CRITICAL)
    other.removeHandler(handler)


@pytest.mark.parametrize("variable", [logs.LEVEL_VARIABLE, logs.FORMAT_VARIABLE])
@pytest.mark.usefixtures("untouched")
def test_a_value_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "loud")

    with pytest.raises(RequestError, match=f"{variable} is 'loud'; it is one of"):
        logs.set_up()
