"""The ranges of pyproject.toml and the versions that were tried, in CONTRIBUTING.md, agree."""

import re
import tomllib
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.version import Version

ROOT: Final = Path(__file__).parents[1]
#: Tools of the tests and of the site, and data: no user installs them with the library.
TOOLS: Final = {"dev", "docs", "demo"}


def declared() -> list[Requirement]:
    """What the package and its extras need, but packages with one version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"]]
    named += [each for name in extras.keys() - TOOLS for each in extras[name]]
    needed = [Requirement(each) for each in named]
    return [
        each
        for each in needed
        if each.name != project["name"] and not any(s.operator == "==" for s in each.specifier)
    ]


def tried() -> dict[str, tuple[str, str]]:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rows = re.findall(r"^\| (\S+) \| (\d\S*) \| (\d\S*) \|$", text, re.MULTILINE)
    return {name: (lowest, newest) for name, lowest, newest in rows}


def test_each_lower_bound_is_the_lowest_version_that_was_tried() -> None:
    bounds = {
        each.name: [s.version for s in each.specifier if s.operator == ">="] for each in declared()
    }

    assert bounds == {name: [lowest] for name, (lowest, _) in tried().items()}


def test_the_newest_version_that_was_tried_is_in_its_range() -> None:
    versions = tried()

    for each in declared():
        lowest, newest = versions[each.name]
        assert each.specifier.contains(newest), each
        assert Version(lowest) <= Version(newest), each
