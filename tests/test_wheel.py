"""The wheel alone, in an empty folder: a new project, its tests, its sinks, and the demo."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmq_pipeline.handling.sink import read_sink
from tests.conftest import Eventually
from tests.free_address import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
#: The packages that it needs; without the links to this checkout, which only a site's own has.
INSTALLED = sysconfig.get_path("purelib")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bin_folder(wheel: Path) -> Path:
    """The commands of an environment with the wheel in it."""
    place = wheel.parent / "environment"
    venv.create(place, symlinks=True)
    with zipfile.ZipFile(wheel) as content:
        content.extractall(next(place.glob("lib/python*/site-packages")))
    command = place / "bin" / "rmq"
    command.write_text(f"#!{place}/bin/python\nfrom rmq_pipeline.cli import main\nmain()\n")
    command.chmod(0o755)
    return place / "bin"


class Shop:
    """A project in an empty folder, and commands of the wheel in it."""

    def __init__(self, bin_folder: Path, folder: Path) -> None:
        self._bin = bin_folder
        self.folder = folder
        keep = {"PATH", "HOME", "JAVA_HOME", "SPARK_LOCAL_IP", "SPARK_SUBMIT_OPTS"}
        self.environment = {key: text for key, text in os.environ.items() if key in keep}
        own = next(bin_folder.parent.glob("lib/python*/site-packages"))
        paths = os.pathsep.join([str(own), INSTALLED])
        self.environment |= {"PYTHONPATH": paths, "RMQ_HOME": str(folder / "home")}

    def start(self, *command: str) -> "subprocess.Popen[str]":
        """Start a command: rmq, or python with its arguments."""
        return subprocess.Popen(
            [str(self._bin / command[0]), *command[1:]],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str) -> str:
        """Run a command to its end, and return what it says."""
        told, _ = (started := self.start(*command)).communicate(timeout=120)
        assert started.returncode == 0, told
        return told


@pytest.fixture(scope="module")
def project(bin_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new project, which every test gets a copy of."""
    folder = tmp_path_factory.mktemp("project")
    Shop(bin_folder, folder).run("rmq", "init", "shop")
    return folder / "shop"


@pytest.fixture
def shop(bin_folder: Path, project: Path, tmp_path: Path) -> Shop:
    return Shop(bin_folder, Path(shutil.copytree(project, tmp_path / "shop")))


@pytest.fixture
def up(shop: Shop) -> Iterator["subprocess.Popen[str]"]:
    ports = ["--port", str(free_port()), "--flight", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    started = shop.start("rmq", "up", *ports)
    yield started
    started.terminate()
    started.communicate(timeout=60)


def test_the_wheel_has_nothing_of_the_checkout(shop: Shop) -> None:
    code = "import rmq_pipeline; print(rmq_pipeline.__file__); import definitions"
    told, _ = shop.start("python", "-u", "-c", code).communicate()

    assert "environment" in told.splitlines()[0]
    assert "No module named 'definitions'" in told


def test_the_wheel_has_the_demo_and_not_its_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()

    assert "rmq_pipeline/examples/flights/demo.py" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"rmq_pipeline"}
    assert not [name for name in names if name.endswith((".csv", ".zip", ".gz", ".parquet"))]
    assert wheel.stat().st_size < 3 << 20


def test_the_demo_begins_in_an_empty_folder(bin_folder: Path, tmp_path: Path) -> None:
    empty = Shop(bin_folder, tmp_path)
    lists = (
        "from rmq_pipeline.examples.flights import definitions as made\n"
        "keys = made.defs.resolve_asset_graph().get_all_asset_keys()\n"
        "print(made.__file__, *sorted(key.to_user_string() for key in keys))\n"
    )

    file, *keys = empty.run("python", "-P", "-c", lists).split()
    told, _ = (demo := empty.start("rmq", "demo", "--days", "366")).communicate(timeout=60)

    assert file.startswith(f"{bin_folder.parent}/")
    assert {"departures", "aircraft_rotations", "late_summary", "crew_changes"} <= set(keys)
    # Said by the demo's own program, before it starts anything.
    assert demo.returncode == 1
    assert told.strip().endswith("There are 1 to 365 days, not 366. Change the request.")
    assert list(tmp_path.iterdir()) == []


def test_the_flights_are_not_loaded_unasked(shop: Shop, bin_folder: Path) -> None:
    code = (
        "import importlib, sys\n"
        "from rmq_pipeline.orchestration.project import CodeLocation\n"
        "found = CodeLocation.find()\n"
        "importlib.import_module(found.module)\n"
        "print(found.module, 'rmq_pipeline.examples' in sys.modules)\n"
    )
    empty = Shop(bin_folder, shop.folder / "empty")
    empty.folder.mkdir()

    assert empty.run("python", "-c", code).split() == [
        "rmq_pipeline.orchestration.upkeep_only",
        "False",
    ]
    assert shop.run("python", "-c", code).split() == ["shop.definitions", "False"]


def test_a_new_project_passes_its_own_tests(shop: Shop) -> None:
    told = shop.run("python", "-m", "pytest", "-q")

    assert "4 passed" in told


def test_dg_lists_the_components_of_the_wheel(shop: Shop) -> None:
    told = shop.run("python", "-m", "dagster_dg_cli.cli", "list", "components", "--json")

    assert "rmq_pipeline.dagster.ConsumerComponent" in told
    assert "rmq_pipeline.dagster.BrokerComponent" in told


@pytest.mark.dagster
@pytest.mark.spark
def test_a_new_project_runs_as_it_is(
    shop: Shop, up: "subprocess.Popen[str]", eventually: Eventually
) -> None:
    assert up.stdout is not None
    project = next(line for line in up.stdout if line.startswith("project"))
    assert project.split() == ["project", "shop.definitions", str(shop.folder)]
    next(line for line in up.stdout if line.startswith("Dagster  http"))
    for amount in (3, 4.5):
        body = json.dumps({"amount": amount})
        shop.run("rmq", "send", "orders", "--body", body, "--message-group", "anna")

    sinks = shop.folder / "home" / "sinks"
    eventually(lambda: read_sink(sinks / "customer_totals").num_rows == 2, within_s=300)
    eventually(lambda: read_sink(sinks / "invoices").num_rows == 2, within_s=60)

    totals = read_sink(sinks / "customer_totals").sort_by("orders")
    assert totals["total"].to_pylist() == [3.0, 7.5]
