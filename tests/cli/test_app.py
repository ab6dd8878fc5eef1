"""Help, completion, exit codes, and how errors look."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from rmq_pipeline.cli.app import app
from tests.cli.conftest import RMQ, Rmq, Served, process

COMMANDS = [
    *("init", "up", "broker", "stop", "status", "topic", "group", "send", "receive", "lag", "find"),
    *(
        "tail",
        "peek",
        "ack",
        "trace",
        "dead-letters",
        "parked",
        "offset",
        "sql",
        "demo",
        "recall",
        "user",
        "acl",
        "sink",
    ),
]


def test_help_names_every_command(no_broker: Rmq) -> None:
    told = no_broker("--help")

    assert told.code == 0
    assert all(f" {command} " in told.text for command in COMMANDS)


def commands(of: Any, *path: str) -> Iterator[list[str]]:
    """The words of every command below another one, and of those that have commands themselves."""
    for name, command in of.commands.items():
        yield [*path, name]
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)


@pytest.mark.parametrize("command", [*commands(typer.main.get_command(app))], ids=" ".join)
def test_every_command_has_help_with_examples(no_broker: Rmq, command: list[str]) -> None:
    told = no_broker(*command, "--help")

    assert told.code == 0
    assert "Examples:" in told.text or "COMMAND [ARGS]" in told.text
    # Brackets say that an argument may be left out; typer puts them there.
    assert "[[" not in told.text
    assert "]..." not in told.text.replace("[ARGS]...", "").replace("[SINK]...", "")


def test_the_terminal_wraps_paragraphs_of_help() -> None:
    told = process(RMQ, "find", "--help", COLUMNS="70").stdout

    lines = [line.strip() for line in told.splitlines()]
    assert "says so. With --json a body that is not UTF-8 is body_base64, as in" in lines


def test_a_listing_takes_json(no_broker: Rmq) -> None:
    listings = ("status", "receive", "lag", "find", "trace", "sql", "stop", "send")
    nested = [("topic", "list"), ("group", "list"), ("dead-letters", "list"), ("offset", "reset")]

    for command in [*((each,) for each in listings), *nested]:
        assert "--json" in no_broker(*command, "--help").text


def imported(*arguments: str) -> set[str]:
    """The modules that a command has imported when it ends."""
    code = (
        f"import sys; sys.argv = ['rmq', *{arguments}]\n"
        "from rmq_pipeline.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('modules:', *sys.modules)"
    )
    return set(process(sys.executable, "-c", code).stdout.partition("modules:")[2].split())


def test_help_does_not_import_what_is_heavy() -> None:
    modules = imported("--help")

    assert "typer" in modules
    assert not modules & {"pyarrow", "numpy", "duckdb", "dagster", "pyspark", "sqlglot", "pandas"}


def test_a_client_command_does_not_import_the_broker() -> None:
    modules = imported("lag", "--home", "/nobody")

    assert "pyarrow" in modules
    assert not modules & {"rmq_pipeline.broker", "duckdb", "dagster", "pyspark", "sqlglot"}


@pytest.mark.parametrize(("shell", "says"), [("bash", "complete"), ("zsh", "#compdef")])
def test_completion_script_prints(shell: str, says: str) -> None:
    told = process(
        RMQ, "--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )

    assert told.returncode == 0
    assert says in told.stdout


def test_completes_the_names_of_topics(topic: str, served: Served) -> None:
    told = process(
        RMQ,
        RMQ_HOME=str(served.home),
        _RMQ_COMPLETE="complete_bash",
        COMP_WORDS=f"rmq topic show {topic[:-1]}",
        COMP_CWORD="3",
    )

    assert topic in told.stdout.split()


def test_a_refusal_is_one_line_with_its_remedy(rmq: Rmq) -> None:
    told = rmq("topic", "show", "nothing")

    assert told.code == 1
    assert told.out == b""
    assert told.err == (
        "TopicNotFoundError: There is no topic nothing. "
        "Create it with `rmq topic create`, or check the name.\n"
    )


def test_a_refusal_is_json_when_json_was_asked_for(rmq: Rmq) -> None:
    told = rmq("topic", "show", "nothing", "--json")

    assert told.code == 1
    assert json.loads(told.err) == {
        "error": "TopicNotFoundError",
        "message": "There is no topic nothing.",
        "remedy": "Create it with `rmq topic create`, or check the name.",
    }


@pytest.mark.parametrize("arguments", [["fetch"], ["send"], ["topic", "list", "--nope"]])
def test_a_command_line_that_cannot_be_read_is_exit_code_2(
    no_broker: Rmq, arguments: list[str]
) -> None:
    told = no_broker(*arguments)

    assert told.code == 2
    assert told.out == b""
    assert "Error" in told.err


@pytest.mark.parametrize("command", ["lag", "status", "topic list", "sql 'select 1'"])
def test_without_a_broker_says_how_to_start_one(no_broker: Rmq, command: str) -> None:
    told = no_broker(*command.replace("'", "").split(maxsplit=1))

    assert told.code == 1
    assert "No broker serves" in told.err
    assert "rmq broker" in told.err


@pytest.mark.parametrize("address", ["10.0.0.1:8082", "example.org:1", "8082", "127.0.0.1:x"])
def test_an_address_that_is_not_on_loopback_is_refused(no_broker: Rmq, address: str) -> None:
    for endpoint in ("--flight", "--grpc", "--grpc-tls"):
        told = no_broker("broker", endpoint, address)

        assert told.code == 1
        assert "loopback" in told.err or "HOST:PORT" in told.err


@pytest.mark.parametrize("address", ["8082", "127.0.0.1:x", "grpc+tls://127.0.0.1"])
def test_an_address_that_is_none_is_refused(no_broker: Rmq, address: str) -> None:
    told = no_broker("lag", "--flight", address)

    assert told.code == 1
    assert "HOST:PORT" in told.err
