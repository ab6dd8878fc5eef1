"""Commands whose standard streams are closed, as under cron."""

import shlex
import subprocess
from pathlib import Path

import psutil
import pytest

from rmq_pipeline.flight.process import serving
from tests.cli.conftest import RMQ, Name, Served, process
from tests.conftest import Eventually


def run(served: Served, redirection: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run ``rmq`` as a shell does."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", RMQ, *arguments]
    return process(*command, RMQ_HOME=str(served.home))


@pytest.mark.parametrize(
    "command", ["sql -", "send {topic} --file -", "user create nobody --password-file -"]
)
def test_a_closed_stdin_is_one_line(served: Served, topic: str, command: str) -> None:
    told = run(served, "<&-", *shlex.split(command.format(topic=topic)))

    assert told.returncode == 1
    assert told.stderr.startswith("RequestError: - reads stdin, but stdin is closed")
    assert told.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        "topic list",
        "topic list --json",
        "topic show {topic}",
        "send {topic} --body hello",
        "sql 'SELECT 1 AS n' --format csv",
        "sql 'SELECT 1 AS n' --format parquet",
    ],
)
def test_a_closed_stdout_ends_the_command_quietly(served: Served, topic: str, command: str) -> None:
    told = run(served, ">&-", *shlex.split(command.format(topic=topic)))

    assert (told.returncode, told.stderr) == (0, "")


def test_a_refusal_without_stderr_is_an_exit_code(served: Served, name: Name) -> None:
    told = run(served, "2>&-", "topic", "show", name("nothing"))

    assert (told.returncode, told.stdout) == (1, "")


def test_no_file_of_a_home_gets_the_number_of_a_closed_stream(
    home: Path, eventually: Eventually
) -> None:
    # What a library prints would go to that file.
    command = [RMQ, "broker", "--home", str(home), "--flight", "127.0.0.1:0", "--grpc", "none"]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]

    with subprocess.Popen(closed) as broker:
        try:
            eventually(lambda: serving(home))
            opened = {each.fd: each.path for each in psutil.Process(broker.pid).open_files()}
        finally:
            broker.terminate()

    assert broker.returncode == 0
    assert any(path.startswith(f"{home}/") for path in opened.values())
    assert not opened.keys() & {0, 1, 2}
