"""``rmq init``: the files of a new Dagster project, from the templates beside this file."""

import keyword
import re
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Final

from rmq_pipeline import __version__
from rmq_pipeline.errors import AlreadyExistsError, RequestError

TEMPLATES: Final = Path(__file__).with_name("template")
#: Ending of a template's file name; without it, Python files would be found by tools.
ENDING: Final = ".template"
#: Settings of the project's Dagster instance: those of `rmq up`.
SETTINGS: Final = Path(__file__).parents[1] / "orchestration" / "dagster.yaml"
#: Folder of the templates that becomes the package of the project.
PACKAGE: Final = "package"
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,49}")
#: Packages that the project needs; a project of the same name would hide them.
_TAKEN: Final = frozenset({"dagster", "duckdb", "pyarrow", "pyspark", "rmq_pipeline", "tests"})


class ProjectExistsError(AlreadyExistsError):
    """The folder of a new project has files."""

    remedy = "Choose another name, or delete the folder."


def check_name(name: str) -> None:
    """Check the name of a project, which is also that of its Python package.

    Raises:
        RequestError: says what a name may be.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise RequestError(
            f"{name!r} is no name of a project.",
            remedy="Give a name of a Python package: small letters, digits and _, at most 50.",
        )
    if name in _TAKEN:
        raise RequestError(
            f"A project named {name} would hide the package {name}.", remedy="Choose another name."
        )


def write(name: str, parent: Path) -> list[Path]:
    """Write a new project into ``parent / name``; return its files.

    Raises:
        RequestError: the name is not one of a Python package.
        ProjectExistsError: the folder exists and is not empty.
    """
    check_name(name)
    folder = parent / name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ProjectExistsError(f"{folder} already exists.")
    written = []
    for place, content in _files(name):
        file = folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
        written.append(file)
    return written


def _files(name: str) -> Iterator[tuple[Path, str]]:
    """Yield path and content of each file."""
    version = ".".join(__version__.split(".")[:2])
    values = {"name": name, "version": version, "title": name.replace("_", " ").capitalize()}
    for template in sorted(TEMPLATES.rglob(f"*{ENDING}")):
        place = template.relative_to(TEMPLATES).with_suffix("")
        if place.parts[0] == PACKAGE:
            place = Path(name, *place.parts[1:])
        yield place, Template(template.read_text(encoding="utf-8")).substitute(values)
    yield Path("dagster_home", SETTINGS.name), SETTINGS.read_text(encoding="utf-8")
