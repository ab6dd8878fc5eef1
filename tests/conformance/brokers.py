"""Brokers and official clients, each in a process of its own."""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RMQ = str(Path(sys.executable).with_name("rmq"))
ANY_PORT = "127.0.0.1:0"

Facts = dict[str, Any]


@dataclass(frozen=True)
class Served:
    """A broker that serves; where its endpoints are."""

    process: "subprocess.Popen[str]"
    home: Path
    grpc: str
    flight: str

    def end(self, *, kill: bool = False) -> None:
        """End it, by SIGKILL when ``kill``."""
        if kill:
            self.process.kill()
        else:
            self.process.terminate()
        self.process.communicate(timeout=30)


def serve(home: Path, *flags: str, grpc: str = ANY_PORT, **settings: Any) -> Served:
    """Start ``rmq broker`` and wait until it serves; settings go to its settings file."""
    environment = dict(os.environ)
    if settings:
        small = Path(os.environ["RMQ_SETTINGS"]).read_text("utf-8")
        more = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
        chosen = home.with_suffix(".toml")
        chosen.write_text(small + more, "utf-8")
        environment["RMQ_SETTINGS"] = str(chosen)
    command = [RMQ, "broker", "--home", str(home), "--flight", ANY_PORT, "--grpc", grpc, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    words = dict(word.split("=", 1) for word in process.stdout.readline().split()[1:])
    return Served(process, home, grpc=words["grpc"], flight=words["flight"])


@contextlib.contextmanager
def serving(home: Path, *flags: str, **settings: Any) -> Iterator[Served]:
    """The same for the time of a block."""
    served = serve(home, *flags, **settings)
    try:
        yield served
    finally:
        served.end()


def rmq(served: Served, *arguments: str) -> Any:
    """Run ``rmq … --json`` against a broker; what it printed."""
    command = [RMQ, *arguments, "--json"]
    environment = os.environ | {"RMQ_HOME": str(served.home)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Official:
    """A process of an official client, at work on its scenarios."""

    def __init__(self, command: list[str], todo: Facts, **environment: str) -> None:
        self._home = tempfile.mkdtemp(prefix="official-client-")
        self._process = subprocess.Popen(
            [*command, json.dumps(todo)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # The Python client writes its log below the home of its user.
            env={**os.environ, "HOME": self._home, **environment},
        )

    def phase(self) -> str:
        """The line that it prints at the end of a phase."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, self._process.communicate(timeout=30)[1][-4000:]
        return line

    def go_on(self) -> None:
        """Let it begin its next phase."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def close_input(self) -> None:
        """Tell it to come to an end, if it waits for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.stdin = None

    def facts(self, *, within_s: float = 150.0) -> Facts:
        """What it saw, once it has ended."""
        try:
            out, err = self._process.communicate(timeout=within_s)
        finally:
            self.end()
        assert self._process.returncode == 0, err[-4000:]
        found: Facts = json.loads(out.splitlines()[-1])
        return found

    def end(self) -> None:
        """End it, wherever it is."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)


def python(module: str, todo: Facts, **environment: str) -> Official:
    """Start a module of this folder that uses the Python client."""
    root = str(HERE.parents[1])
    command = [sys.executable, "-W", "ignore", "-m", f"tests.conformance.{module}"]
    return Official(command, todo, PYTHONPATH=root, **environment)


def node(script: str, todo: Facts, **environment: str) -> Official:
    """Start a script of the folder ``node``, which uses the Node client."""
    command = ["node", str(HERE / "node" / script)]
    modules = node_modules()
    return Official(command, todo, NODE_PATH=str(modules), **environment)


def node_modules() -> Path:
    """The client's packages, installed when they are not in the cache yet."""
    lock = (HERE / "node" / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rmq_pipeline"
    folder = cache / f"node-{hashlib.sha256(lock).hexdigest()[:16]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as fresh:
            for name in ("package.json", "package-lock.json"):
                shutil.copy(HERE / "node" / name, fresh)
            command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            subprocess.run(command, cwd=fresh, check=True, capture_output=True)
            # Another run may have been faster: one of them is as good as the other.
            with contextlib.suppress(OSError):
                Path(fresh).rename(folder)
                Path(fresh).mkdir()
    return folder / "node_modules"
