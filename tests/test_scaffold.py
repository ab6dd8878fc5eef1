"""``rmq init``: a project that is written as it should be, or not at all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rmq_pipeline import scaffold
from rmq_pipeline.errors import RequestError
from tests.cli.conftest import RMQ, process

TOOLS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projects")
    scaffold.write("shop", folder)
    return folder / "shop"


def ran(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_command_lists_its_files_and_says_how_to_go_on(tmp_path: Path) -> None:
    told = process(RMQ, "init", "shop", "--directory", str(tmp_path))
    as_json = process(RMQ, "init", "shop2", "--directory", str(tmp_path), "--json")

    assert told.returncode == 0
    assert "wrote  shop/shop/definitions.py" in told.stdout
    assert told.stdout.strip().endswith(f"Next: cd {tmp_path}/shop && rmq up")
    files = [Path(file) for file in json.loads(as_json.stdout)["files"]]
    assert files
    assert all(file.is_file() for file in files)


def test_nothing_of_a_template_is_left(shop: Path) -> None:
    files = [file for file in shop.rglob("*") if file.is_file()]

    assert {"pyproject.toml", "dagster.yaml", "definitions.py", "test_totals.py"} <= {
        file.name for file in files
    }
    assert not [file for file in files if "$" in file.read_text()]


def test_its_definitions_load_with_every_part(shop: Path) -> None:
    code = (
        "import dagster as dg; from shop.definitions import defs\n"
        "dg.Definitions.validate_loadable(defs)\n"
        "keys = defs.resolve_asset_graph().get_all_asset_keys()\n"
        "print(*sorted(key.to_user_string() for key in keys))"
    )

    told = ran(sys.executable, "-c", code, cwd=shop)

    assert not told.stderr
    assert {"orders", "payments", "payments_checks", "customer_totals", "invoices"} <= set(
        told.stdout.split()
    )


def test_its_code_is_formatted(shop: Path) -> None:
    told = ran(
        *(str(TOOLS / "ruff"), "format", "--check", "--line-length", "100", "--isolated", "."),
        cwd=shop,
    )

    assert told.returncode == 0, told.stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "is no name of a project"),
        ("Shop", "is no name of a project"),
        ("my-shop", "is no name of a project"),
        ("../shop", "is no name of a project"),
        ("class", "is no name of a project"),
        ("a" * 51, "is no name of a project"),
        ("dagster", "would hide the package dagster"),
        ("tests", "would hide the package tests"),
    ],
)
def test_a_name_that_is_no_package_is_refused(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=says):
        scaffold.write(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "mine.txt").touch()

    with pytest.raises(scaffold.ProjectExistsError, match="already exists"):
        scaffold.write("shop", tmp_path)
    assert [file.name for file in (tmp_path / "shop").iterdir()] == ["mine.txt"]
