"""The blocks of docs/tutorial.md, in their order: commands, files and changes, on a real broker."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from tests.conftest import Eventually

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
#: Language, file and content of each block.
BLOCKS: Final = re.findall(
    r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE
)
#: The ports of the page may be taken, and no browser looks at the web page.
FREE_PORTS: Final = "--port 0 --flight 127.0.0.1:0 --grpc 127.0.0.1:0 --ui none"
#: Commands that show what a run has done meanwhile: repeated until they show it.
READS: Final = ("rmq topic list", "rmq dead-letters list", "rmq lag", "rmq sql", "python ")
#: A busy machine starts Dagster in a minute.
PATIENCE_S: Final = 150


class Reader:
    """Does what the page says, in a terminal of its own."""

    def __init__(self, folder: Path, eventually: Eventually) -> None:
        self._folder = folder
        self._eventually = eventually
        own = {"RMQ_HOME", "RMQ_FLIGHT", "DAGSTER_HOME"}
        self._environment = {key: text for key, text in os.environ.items() if key not in own}
        self._environment |= {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "JAVA_HOME": str(folder / "no_jdk"),  # The tutorial needs none, and a JVM takes long.
            "COLUMNS": "200",
        }
        if not entry_points(group="pytest11", name="rmq"):  # an older installation of this checkout
            self._environment["PYTEST_PLUGINS"] = "rmq_pipeline.pytest_plugin"
        self._up: subprocess.Popen[str] | None = None

    def follow(self, language: str, file: str, content: str) -> None:
        """Do what a block says."""
        if language == "console":
            for command, output in commands(content):
                self._run(command, output)
        elif language == "diff":
            self._change(self._folder / file, content)
        else:
            (self._folder / file).write_text(content, "utf-8")

    def close(self) -> None:
        """Press Ctrl-C in the terminal of ``rmq up``."""
        if self._up is not None:
            self._up.send_signal(signal.SIGINT)
            self._up.communicate(timeout=PATIENCE_S)
            self._up = None

    def _run(self, command: str, output: str) -> None:
        if command.startswith("cd "):
            self._folder /= command.removeprefix("cd ")
        elif command == "rmq up":
            self.close()
            self._start(output)
        elif command.startswith(READS):
            self._eventually(lambda: agrees(self._said(command), output), within_s=PATIENCE_S)
        elif not command.startswith("pip install"):
            said = self._said(command)
            assert agrees(said, output), said

    def _said(self, command: str) -> str:
        done = subprocess.run(
            shlex.split(command),
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.stdout

    def _start(self, output: str) -> None:
        self._up = subprocess.Popen(
            [*shlex.split("rmq up"), *shlex.split(FREE_PORTS)],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._up.stdout is not None
        said = ""
        for line in self._up.stdout:
            said += line
            if line.startswith("Ctrl-C"):
                break
        assert agrees(said, output), said

    @staticmethod
    def _change(file: Path, change: str) -> None:
        lines = change.splitlines(keepends=True)
        before, after = (
            "".join(line[1:] for line in lines if line.startswith(sign)) for sign in "-+"
        )
        text = file.read_text("utf-8")
        assert text.count(before) == 1
        file.write_text(text.replace(before, after), "utf-8")


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block, and the output that the page shows."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def agrees(said: str, output: str) -> bool:
    """Compare an output with that of the page, where … is any text, and addresses differ."""
    words = re.sub(r"127\.0\.0\.1:\d+", "…", output).split()
    pattern = r"\s+".join(re.escape(word).replace("…", ".*") for word in words)
    return re.search(pattern.replace(r"\s+.*", r"\s*.*"), said, re.DOTALL) is not None


@pytest.fixture
def reader(tmp_path: Path, eventually: Eventually) -> Iterator[Reader]:
    reader = Reader(tmp_path, eventually)
    yield reader
    reader.close()


@pytest.mark.slow
@pytest.mark.dagster
@pytest.mark.timeout(900)
def test_the_tutorial_does_what_it_says(reader: Reader) -> None:
    languages = [language for language, *_ in BLOCKS]
    assert languages.count("console") >= 10
    assert set(languages) == {"console", "python", "diff"}

    for block in BLOCKS:
        reader.follow(*block)


@pytest.mark.parametrize(
    ("said", "agreed"),
    [
        ("broker 127.0.0.1:4711\nhome /tmp/shop/.rmq\n", True),
        ("broker 127.0.0.1:4711\nhome /tmp/flights/.rmq\n", False),
        ("", False),
    ],
)
def test_another_output_is_found(said: str, *, agreed: bool) -> None:
    assert agrees(said, "broker   127.0.0.1:8082\nhome …/shop/.rmq\n…\n") == agreed
