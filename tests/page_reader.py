"""A reader who does what a page says, block by block, in a folder, with real brokers."""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.util
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import pytest

from rmq_pipeline.cli.app import run
from rmq_pipeline.flight.client import Client
from tests.waiting import until

ROOT: Final = Path(__file__).parents[1]
_FENCE: Final = re.compile(r"^( *)```([^\n]*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
#: Absolute folders of the pages are within the reader's folder.
FOLDERS: Final = ("/backup", "/srv", "/tmp", "/var/lib")
#: Addresses of a broker that was given none.
USUAL: Final = {"grpc": "127.0.0.1:8081", "flight": "127.0.0.1:8082"}
#: The ports of the pages may be taken. No browser looks at the web page of `rmq up`.
FREE_PORTS: Final = {
    "broker": {"--flight": "127.0.0.1:0", "--grpc": "127.0.0.1:0"},
    "up": {"--port": "0", "--flight": "127.0.0.1:0", "--grpc": "127.0.0.1:0", "--ui": "none"},
    "ui": {"--listen": "127.0.0.1:0"},
}
#: The last line that each prints before it serves.
LAST_LINES: Final = {"broker": "ready ", "up": "Ctrl-C", "ui": "page"}
#: Commands that show what another process does meanwhile: repeated until they show it.
READS: Final = ("rmq topic list", "rmq dead-letters list", "rmq lag", "rmq sql", "python ", "curl ")
_JOINTS: Final = {"|", ";", ">", "2>"}
#: Parts of outputs that differ each time: times, sizes, addresses.
_DIFFERENT: Final = (
    re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?Z?"),
    re.compile(r"\d+(\.\d+)? (B|KiB|MiB|GiB)\b"),
    re.compile(r"127\.0\.0\.1:\d+"),
)
_FIGURE: Final = re.compile(r"(?<![\w.])\d+(\.\d+)?(?![\w.])")


@dataclass(frozen=True)
class Block:
    """A block of a page."""

    language: str
    #: The file that it is the content of, or empty.
    file: str
    text: str

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page, in their order."""
    found = []
    for _, fence, text in _FENCE.findall((ROOT / page).read_text("utf-8")):
        title = re.search(r'title="([^"]*)"', fence)
        file = title.group(1) if title else ""
        found.append(Block(f"{fence} ".split(" ")[0], file, textwrap.dedent(text)))
    return found


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block, and the output that the page shows."""
    for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        *first, last = re.sub(r"\s+# .*", "", line).split(" · ")
        yield from ((command, "") for command in first)
        yield last.strip(), output


def agrees(said: str, output: str, *, figures: bool = True) -> bool:
    """Compare an output with that of the page, where … is any text.

    Times, sizes and addresses differ each time; without ``figures`` other numbers do so, too.
    """
    for pattern in (*_DIFFERENT, *(() if figures else (_FIGURE,))):
        said, output = pattern.sub("#", said), pattern.sub("…", output)
    words = output.split()
    pattern = r"\s+".join(re.escape(word).replace("…", ".*") for word in words)
    return re.search(pattern.replace(r"\s+.*", r"\s*.*"), said, re.DOTALL) is not None


@cache
def processes() -> ForkServerContext:
    """Processes with everything imported: an interpreter with DuckDB and Arrow takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        # Python deletes the folder of its sockets at its exit, after the folder of the run is gone.
        patch.setattr(tempfile, "tempdir", os.environ["PYTEST_DEBUG_TEMPROOT"])
        multiprocessing.util.get_temp_dir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [__name__, "rmq_pipeline.serving.serve", "rmq_pipeline.rocketmq.grpc_endpoint"]
    )
    return context


def _rmq(words: list[str], folder: Path, environment: dict[str, str], output: Path) -> None:
    """Be the command `rmq`, in a process of its own."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    for each in (1, 2):
        os.dup2(descriptor, each)
    sys.argv = words
    run()


@dataclass(frozen=True)
class Started:
    """A command that was started."""

    process: ForkServerProcess
    output: Path

    @property
    def said(self) -> str:
        return self.output.read_text("utf-8")

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGINT)

    def ended(self, within_s: float) -> int:
        """Wait until it has ended; return its exit code."""
        self.process.join(within_s)
        assert self.process.exitcode is not None, f"not ended within {within_s} s: {self.said}"
        return self.process.exitcode


@dataclass
class Reader(AbstractContextManager["Reader"]):
    """Does what a page says, in a terminal of its own."""

    folder: Path
    #: Commands, and first lines of other blocks, that cannot be run here, and why.
    not_run: Mapping[str, str] = field(default_factory=dict)
    #: Steps before commands, and before first lines of other blocks.
    before: Mapping[str, Callable[[Reader], None]] = field(default_factory=dict)
    #: Commands whose exit code is not 0, as the page says.
    fails: Container[str] = ()
    #: Whether numbers of outputs are compared.
    figures: bool = True
    #: Whether `rmq up` starts Dagster; without, its broker alone serves.
    with_dagster: bool = False
    patience_s: float = 120
    #: RMQ_HOME, or empty: the home is that of the project in the folder.
    home: str = "/srv/rmq"
    #: Texts of the page, and what stands for each of them here.
    instead: dict[str, str] = field(default_factory=dict)
    #: Servers of others.
    given: Mapping[str, Any] = field(default_factory=dict)
    #: Names of the Python of the page.
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "page"})

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        for each in FOLDERS:
            (self.folder / each[1:]).mkdir(parents=True)
            self.instead[each] = f"{self.folder}{each}"
        own = {"RMQ_HOME", "RMQ_FLIGHT", "DAGSTER_HOME"}
        self.environment = {key: text for key, text in os.environ.items() if key not in own}
        self.environment |= {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "JAVA_HOME": str(self.folder / "no_jdk"),  # No page needs one, and a JVM takes long.
            "COLUMNS": "200",
        }
        if not entry_points(group="pytest11", name="rmq"):  # an older installation of this checkout
            self.environment["PYTEST_PLUGINS"] = "rmq_pipeline.pytest_plugin"
        if self.home:
            self.environment["RMQ_HOME"] = self.here(self.home)
        self._served: dict[str, Started] = {}
        self._count = 0
        self._outputs = self.folder / "outputs"
        self._outputs.mkdir()
        self._client: Client | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def client(self) -> Client:
        """A client of the broker of the home."""
        if self._client is None:
            self._client = Client(home=self._home)
        return self._client

    @property
    def _home(self) -> str:
        """The home of commands that name none."""
        return self.environment.get("RMQ_HOME", f"{self.folder}/.rmq")

    def follow_page(self, page: str) -> None:
        """Do what the blocks of a page say, in their order."""
        for block in blocks_of(page):
            self.follow(block)

    def follow(self, block: Block) -> None:
        """Do what a block says."""
        if block.first_line in self.not_run:
            return
        if block.language != "console":
            self._prepare(block.first_line)
        if block.language == "console":
            for command, output in commands(block.text):
                self.run(command, output)
        elif block.language == "diff":
            self._change(self.folder / block.file, block.text)
        elif block.file:
            (self.folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / block.file).write_text(self.here(block.text), "utf-8")
        elif block.language == "python":
            self.python(self.here(block.text))
        elif block.language == "sql":
            for query in filter(str.strip, block.text.split(";")):
                self.client.sql(query)
        elif block.language == "yaml":
            written = [file.read_text("utf-8") for file in self.folder.rglob("*.yaml")]
            assert any(block.text in text for text in written), f"no file has {block.text}"
        elif block.language not in {"", "text"}:
            raise AssertionError(f"A block of {block.language} cannot be run: {block.text}")

    def run(self, command: str, output: str = "") -> None:
        """Run a command as the page writes it, and compare its output with that of the page."""
        if command in self.not_run:
            return
        self._prepare(command)
        words = shlex.split(self.here(command), comments=True)
        if words[0] == "rmq" and words[1] in LAST_LINES:
            self._serve(words[1], words[2:], output)
        elif command.startswith(READS) and output:
            until(
                lambda: self._shows(command, output),
                within_s=self.patience_s,
                what=lambda: f"{command}: {self._said(command)}",
            )
        else:
            said = self._said(command)
            assert self._agree(said, output), f"{command}: {said}"

    def python(self, program: str) -> None:
        """Run Python with the names of the page."""
        with self._terminal():
            exec(compile(program, "page", "exec", dont_inherit=True), self.names)

    def here(self, text: str) -> str:
        """Return a text of the page with the folders, addresses and names that it has here."""
        known = "|".join(
            rf"(?<!{'[.]' if each[0] != '/' else '[./]'})(?<!\w){re.escape(each)}"
            for each in sorted(self.instead, key=len, reverse=True)
        )
        return re.sub(rf"(?:{known})(?!\w)", lambda found: self.instead[found.group()], text)

    def close(self) -> None:
        """Close the client, and press Ctrl-C in each terminal."""
        if self._client is not None:
            self._client.close()
            self._client = None
        for home in list(self._served):
            self._end(home)

    def _prepare(self, text: str) -> None:
        if text in self.before:
            self.before[text](self)

    def _shows(self, command: str, output: str) -> bool:
        """Run a command that may fail until another process has done its part."""
        try:
            return self._agree(self._said(command), output)
        except AssertionError:
            return False

    def _agree(self, said: str, output: str) -> bool:
        for text, real in self.instead.items():
            said = said.replace(real, text)
        return agrees(said, output, figures=self.figures)

    def _said(self, command: str) -> str:
        """Run a command to its end; return what it printed."""
        if " && " in command:
            return "".join(map(self._said, command.split(" && ")))
        words = shlex.split(self.here(command), comments=True)
        if words[0] == "cd":
            self.folder /= words[1]
            return ""
        if words[0] == "export":
            self.environment |= dict(each.split("=", 1) for each in words[1:])
            return ""
        if words[0] == "rmq" and not _JOINTS & set(words):
            started = self._started(words)
            code, said = started.ended(self.patience_s), started.said
        else:
            code, said = self._in_a_shell(command)
        assert code == 0 or command in self.fails, f"{command} ended with {code}: {said}"
        return said

    def _in_a_shell(self, command: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", self.here(command)],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self.patience_s,
            check=False,
        )
        return done.returncode, done.stdout

    def _started(self, words: list[str]) -> Started:
        """Start `rmq`."""
        self._count += 1
        output = self._outputs / f"{self._count}.txt"
        output.touch()
        process = processes().Process(
            target=_rmq, args=(words, self.folder, self.environment, output)
        )
        process.start()
        return Started(process, output)

    @contextmanager
    def _terminal(self) -> Iterator[None]:
        """Make the folder and the variables of the reader those of this process."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            for name in set(os.environ) - set(self.environment):
                patch.delenv(name)
            for name, text in self.environment.items():
                patch.setenv(name, text)
            yield

    def _serve(self, program: str, options: list[str], output: str) -> None:
        """Start a broker, or `rmq up`, and wait until it serves; end the one of its home before."""
        given = dict(itertools.pairwise(options))
        home = given.get("--home", self._home) + (program if program == "ui" else "")
        self._end(home)
        if program == "up" and not self.with_dagster:
            program, output = "broker", ""
        for flag, address in FREE_PORTS[program].items():
            if flag not in given:
                options = [*options, flag, address]
        options = [re.sub(r"^([\d.]+):[1-9]\d+$", r"\1:0", each) for each in options]
        served = self._served[home] = self._started(["rmq", program, *options])
        until(
            lambda: f"\n{LAST_LINES[program]}" in f"\n{served.said}" or not served.is_alive,
            within_s=self.patience_s,
        )
        said = served.said
        assert served.is_alive, said
        for name, address in re.findall(r"(\w+)=(\S+:\d+)", said):
            on_page = given.get(f"--{name.replace('_', '-')}", USUAL.get(name, ""))
            if on_page and not on_page.endswith(":0"):
                self.instead[on_page] = address
        assert self._agree(said, output), said

    def _end(self, home: str) -> None:
        served = self._served.pop(home, None)
        if served is not None and served.is_alive:
            served.interrupt()
            served.ended(self.patience_s)

    @staticmethod
    def _change(file: Path, change: str) -> None:
        lines = change.splitlines(keepends=True)
        before, after = (
            "".join(line[1:] for line in lines if line.startswith(sign)) for sign in "-+"
        )
        text = file.read_text("utf-8")
        assert text.count(before) == 1
        file.write_text(text.replace(before, after), "utf-8")
