"""The command ``rmq``, in this process, against a real broker in its own."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pytest

from rmq_pipeline.cli.app import run

RMQ = str(Path(sys.executable).with_name("rmq"))

Name = Callable[[str], str]


@dataclass(frozen=True)
class Result:
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


class Rmq(Protocol):
    def __call__(self, *arguments: str, stdin: bytes = b"") -> Result: ...


@dataclass(frozen=True)
class Served:
    """A broker in a process of its own."""

    process: "subprocess.Popen[str]"
    home: Path
    ready: str


def serve(home: Path, *flags: str) -> Served:
    """Start ``rmq broker`` and wait for its line."""
    command = [RMQ, "broker", "--home", str(home), "--flight", "127.0.0.1:0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return Served(process, home, process.stdout.readline())


def end(served: Served) -> str:
    """End it; what it printed after its line."""
    served.process.terminate()
    rest, _ = served.process.communicate(timeout=30)
    return rest


def process(*command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in a process of its own to its end."""
    return subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, **environment}
    )


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One broker for all tests of the command line: their names differ."""
    served = serve(tmp_path_factory.mktemp("cli") / "home")
    yield served
    end(served)


@pytest.fixture
def no_broker(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> Rmq:
    """``rmq`` with a home that nobody serves."""
    monkeypatch.setenv("RMQ_HOME", str(tmp_path / "nobody"))

    def call(*arguments: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "argv", ["rmq", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code: object = 0
        try:
            run()
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capsysbinary.readouterr()
        assert isinstance(code, int)
        return Result(code, out, err.decode())

    return call


@pytest.fixture
def rmq(no_broker: Rmq, served: Served, monkeypatch: pytest.MonkeyPatch) -> Rmq:
    """``rmq("topic", "list", stdin=b"")``: run it with the broker's home in RMQ_HOME."""
    monkeypatch.setenv("RMQ_HOME", str(served.home))
    return no_broker


@pytest.fixture(scope="session")
def numbers() -> Iterator[int]:
    return count()


@pytest.fixture
def name(numbers: Iterator[int]) -> Name:
    """``name("orders")``: a name that no other test has."""
    return lambda stem: f"{stem}_{next(numbers)}"


@pytest.fixture
def topic(rmq: Rmq, name: Name) -> str:
    """A normal topic with one queue."""
    topic = name("topic")
    assert rmq("topic", "create", topic, "--queues", "1").code == 0
    return topic


@pytest.fixture
def group(rmq: Rmq, name: Name) -> str:
    """A consumer group that gives up after the second delivery."""
    group = name("group")
    assert rmq("group", "create", group, "--max-attempts", "2", "--backoff-ms", "0").code == 0
    return group
