"""deploy/Containerfile, read by a parser and followed without a container engine."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.version import Version

from tests.free_address import free_port
from tests.test_pages import parse
from tests.test_wheel import INSTALLED, Shop, bin_folder, wheel  # noqa: F401 - fixtures, too

if TYPE_CHECKING:
    from tests.conftest import Eventually

ROOT: Final = Path(__file__).parents[1]
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
#: What docs/deployment.md says that stopping takes at most; a quiet machine takes a few seconds.
STOP_S: Final = 60
#: The engine calls a container unhealthy after the start period and three failed checks.
HEALTHY_S: Final = 150
#: Programs of RUN that change the system: only a container engine can show what they do.
OF_THE_SYSTEM: Final = {"apt-get", "rm", "useradd"}


class Image:
    """The instructions of a Containerfile, followed in a folder instead of an image."""

    def __init__(self, content: bytes) -> None:
        self._parsed = DockerfileParser(fileobj=BytesIO(content))
        self.base: str = self._parsed.baseimage
        self.instructions = [
            (each["instruction"], each["value"])
            for each in self._parsed.structure
            if each["instruction"] != "COMMENT"
        ]

    def value(self, instruction: str) -> str:
        """The value of an instruction that stands there once."""
        (value,) = (value for name, value in self.instructions if name == instruction)
        return str(value)

    def command(self, instruction: str) -> list[str]:
        """The arguments of an instruction in JSON, which starts no shell."""
        found = json.loads(self.value(instruction).partition("[")[2].join("[ "))
        return [str(each) for each in found]

    @property
    def environment(self) -> dict[str, str]:
        return dict(self._parsed.envs)

    @property
    def steps(self) -> list[list[str]]:
        """The commands of all RUN, one after the other."""
        lines = [value for name, value in self.instructions if name == "RUN"]
        return [shlex.split(step) for line in lines for step in line.split("&&")]


@pytest.fixture(scope="module")
def image() -> Image:
    return Image((ROOT / "deploy" / "Containerfile").read_bytes())


def test_the_image_has_a_python_of_the_range_of_the_project(image: Image) -> None:
    name, _, tag = image.base.rpartition(":")
    version = Version(tag.partition("-")[0])

    assert name == "docker.io/library/python"
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(version)


def test_the_image_starts_a_command_that_parses(image: Image) -> None:
    assert image.command("ENTRYPOINT") == ["rmq"]
    parse(image.command("CMD"), spoken=False)
    assert image.command("HEALTHCHECK")[0] == "rmq"
    parse(image.command("HEALTHCHECK")[1:], spoken=False)


def test_the_image_runs_as_a_user_of_its_own_who_owns_the_volume(image: Image) -> None:
    names = [name for name, _ in image.instructions]
    (made,) = (step for step in image.steps if step[0] == "useradd")
    (folder,) = (step for step in image.steps if step[0] == "install")
    user = image.value("USER")

    assert made[-1] == user
    assert folder[1:] == ["-d", "-o", user, "-g", user, image.value("VOLUME")]
    assert image.environment["RMQ_HOME"].startswith(f"{image.value('VOLUME')}/")
    # The project and its packages are installed before, by root.
    assert names.index("USER") > max(n for n, name in enumerate(names) if name == "RUN")


def test_the_image_has_a_dagster_of_the_range_of_the_project(image: Image) -> None:
    (install,) = (step for step in image.steps if step[0] == "pip")
    wanted = [Requirement(each) for each in install if each.startswith("dagster")]
    (pyspark,) = (
        Requirement(each)
        for each in PROJECT["optional-dependencies"]["spark"]
        if each.startswith("dagster-pyspark")
    )

    # All of Dagster's integrations have one version.
    assert [(each.name, each.specifier) for each in wanted] == [
        ("dagster-postgres", pyspark.specifier)
    ]


class Followed:
    """The image's folders below a temporary one, and its commands in an environment of the wheel.

    Packages come from this environment, not from a registry: pip checks their versions only.
    """

    def __init__(self, image: Image, commands: Path, root: Path) -> None:
        self.image = image
        self._root = root
        self._bin = commands
        self._work = self.there(image.value("WORKDIR"))
        own = next(commands.parent.glob("lib/python*/site-packages"))
        kept = {name: os.environ[name] for name in ("JAVA_HOME", "HOME") if name in os.environ}
        declared = {name: self._moved(text) for name, text in image.environment.items()}
        self._environment = {
            **kept,
            **declared,
            "PATH": os.pathsep.join([str(commands), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(own), INSTALLED]),
        }

    def there(self, path: str) -> Path:
        return self._root / path.lstrip("/")

    def _moved(self, text: str) -> str:
        return str(self.there(text)) if text.startswith("/") else text

    def build(self, project: Path) -> list[str]:
        """Follow COPY and RUN; return the programs that were left out."""
        left_out = []
        for name, value in self.image.instructions:
            if name == "COPY":
                *flags, source, target = shlex.split(value)
                assert (source, target) == (".", ".")
                assert flags == [f"--chown={self.image.value('USER')}:{self.image.value('USER')}"]
                shutil.copytree(project, self._work)
        for program, *arguments in self.image.steps:
            if program in OF_THE_SYSTEM:
                left_out.append(program)
            elif program == "install":
                owner = arguments.index("-o")
                plain = [self._moved(each) for each in arguments]
                del plain[owner : owner + 4]
                subprocess.run(["install", *plain], check=True)
            else:
                assert program == "pip"
                # Without isolation, the build takes hatchling from this environment.
                offline = ["--no-index", "--no-build-isolation", "--disable-pip-version-check"]
                pip = [sys.executable, "-m", "pip", "--python", str(self._bin / "python")]
                self.run([*pip, *arguments, *offline])
        return left_out

    def run(self, command: list[str]) -> str:
        """Run a command to its end, and return what it says."""
        done = subprocess.run(
            command,
            cwd=self._work,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def is_healthy(self) -> bool:
        """What the engine asks every 30 s."""
        done = subprocess.run(
            self._found(self.image.command("HEALTHCHECK")),
            cwd=self._work,
            env=self._environment,
            capture_output=True,
            check=False,
        )
        return done.returncode == 0

    def start(self, *more: str) -> subprocess.Popen[str]:
        command = [*self.image.command("ENTRYPOINT"), *self.image.command("CMD"), *more]
        return subprocess.Popen(
            self._found(command),
            cwd=self._work,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _found(self, command: list[str]) -> list[str]:
        program = shutil.which(command[0], path=self._environment["PATH"])
        assert program is not None
        return [program, *command[1:]]


@pytest.mark.slow
@pytest.mark.dagster
def test_the_image_is_built_gets_healthy_and_stops_in_time(
    image: Image,
    bin_folder: Path,  # noqa: F811 - the fixture
    tmp_path: Path,
    eventually: Eventually,
) -> None:
    """Follow the file for a project of `rmq init`, start what it starts, and stop that.

    No container engine runs here. So this does not show: that the base image exists and has Python
    3.12, what apt-get installs, the user and the owners of files, what .containerignore leaves out,
    and that the package is in a registry. Ports differ, because other tests have those of the file.
    """
    Shop(bin_folder, tmp_path).run("rmq", "init", "shop")
    followed = Followed(image, bin_folder, tmp_path / "image")

    left_out = followed.build(tmp_path / "shop")

    assert set(left_out) == OF_THE_SYSTEM
    assert "shop" in followed.run(
        [str(bin_folder / "python"), "-P", "-c", "import shop; print(shop.__file__)"]
    )
    ports = ["--port", str(free_port()), "--flight", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    container = followed.start(*ports, "--metrics", f"127.0.0.1:{free_port()}", "--ui", "none")
    try:
        begun_s = time.monotonic()
        eventually(followed.is_healthy, within_s=HEALTHY_S)
        healthy_s = time.monotonic() - begun_s
        assert container.stdout is not None
        next(line for line in container.stdout if line.startswith("Dagster  http"))

        begun_s = time.monotonic()
        container.send_signal(signal.SIGTERM)
        told, _ = container.communicate(timeout=STOP_S)
        stopped_s = time.monotonic() - begun_s
    finally:
        container.kill()
        container.communicate()

    print(f"healthy after {healthy_s:.1f} s, stopped within {stopped_s:.1f} s")
    assert container.returncode == 0, told
    assert not followed.is_healthy()
    assert (followed.there(image.environment["RMQ_HOME"]) / "state.duckdb").exists()
