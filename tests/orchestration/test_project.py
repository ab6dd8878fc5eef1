"""The code that `rmq up` loads: a module by name, the project of a folder, or no project at all."""

from pathlib import Path

import pytest

from rmq_pipeline.errors import NotFoundError, RequestError, RocketMQError
from rmq_pipeline.orchestration.project import UPKEEP_ONLY, CodeLocation


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "definitions.py").touch()
    return tmp_path


def named(folder: Path, toml: str) -> Path:
    (folder / "pyproject.toml").write_text(toml)
    return folder


@pytest.mark.parametrize(
    "toml",
    [
        '[tool.dagster]\nmodule_name = "shop.definitions"',
        '[tool.dg.project]\nroot_module = "shop"',
        '[tool.dg.project]\nroot_module = "x"\ncode_location_target_module = "shop.definitions"',
    ],
)
def test_a_project_names_its_module_as_dagster_reads_it(shop: Path, toml: str) -> None:
    found = CodeLocation.find(folder=named(shop, toml))

    assert (found.module, found.folder, found.name) == ("shop.definitions", shop, "shop")
    assert found.is_project


def test_the_current_folder_is_the_project(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(named(shop, '[tool.dagster]\nmodule_name = "shop.definitions"'))

    assert CodeLocation.find().module == "shop.definitions"


def test_a_folder_without_a_project_has_only_the_upkeep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(named(tmp_path, '[project]\nname = "other"'))

    found = CodeLocation.find()

    assert (found.module, found.name, found.is_project) == (UPKEEP_ONLY, "rmq_pipeline", False)


def test_a_module_by_name_needs_no_project(shop: Path) -> None:
    assert CodeLocation.find("shop.definitions", shop).folder == shop
    assert CodeLocation.find("json.tool", shop).module == "json.tool"  # an installed one


def test_a_folder_with_definitions_is_a_project_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "definitions.py").touch()

    found = CodeLocation.find(folder=tmp_path)

    assert (found.module, found.name) == ("definitions", tmp_path.name)


@pytest.mark.parametrize(
    ("module", "toml", "error", "says"),
    [
        ("shop.missing", "", NotFoundError, "no module shop.missing in"),
        ("shop.definitions.deeper", "", NotFoundError, "no module shop.definitions.deeper"),
        ("nowhere.definitions", "", NotFoundError, "no module nowhere.definitions"),
        ("__main__", "", NotFoundError, "no module __main__ in"),
        ("shop/definitions.py", "", RequestError, "is no module name"),
        ("shop..definitions", "", RequestError, "is no module name"),
        (None, "", NotFoundError, "has no Dagster project"),
        (None, "[tool.dagster", RequestError, "pyproject.toml cannot be read"),
        (None, "[tool.dagster]\nmodule_name = 3", RequestError, "names the module 3"),
        (None, "tool = 3", RequestError, "tool is not a table"),
        (None, "[tool]\ndg = 3", RequestError, r"tool\.dg is not a table"),
        (None, "[tool.dg.project]\nroot_module = 3", RequestError, "names the module 3"),
        (None, '[tool.dagster]\nmodule_name = "gone"', NotFoundError, "no module gone in"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_a_remedy(
    shop: Path, module: str | None, toml: str, error: type[RocketMQError], says: str
) -> None:
    if toml:
        named(shop, toml)

    with pytest.raises(error, match=says) as refused:
        CodeLocation.find(module, shop)

    assert error is RequestError or "rmq init" in str(refused.value)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="gone does not exist"):
        CodeLocation.find(folder=tmp_path / "gone")
