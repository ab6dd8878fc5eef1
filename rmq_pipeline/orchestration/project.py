"""The code that `rmq up` loads: a module by name, or that of the project in a folder."""

import importlib.machinery
import importlib.util
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from rmq_pipeline.errors import NotFoundError, RequestError

PYPROJECT: Final = "pyproject.toml"
#: The module of a folder whose pyproject.toml names none.
DEFINITIONS: Final = "definitions"
#: Loaded where there is no project.
UPKEEP_ONLY: Final = "rmq_pipeline.orchestration.upkeep_only"


class ModuleNotFoundInProjectError(NotFoundError):
    """The module that Dagster should load does not exist."""

    remedy = (
        "Name a module with -m and its folder with -d, or write a project with `rmq init NAME`."
    )


@dataclass(frozen=True)
class CodeLocation:
    """A module with Dagster definitions, and the folder from which it is imported."""

    module: str
    folder: Path

    @property
    def name(self) -> str:
        """Name in Dagster's UI: of the package with the definitions, or of the folder."""
        if self.module == UPKEEP_ONLY:
            return "rmq_pipeline"
        return (
            self.folder.name
            if self.module == DEFINITIONS
            else self.module.removesuffix(".definitions")
        )

    @property
    def is_project(self) -> bool:
        """True if it has code of the user's own."""
        return self.module != UPKEEP_ONLY

    @classmethod
    def find(cls, module: str | None = None, folder: Path | None = None) -> Self:
        """Return the code location of a module, or of the project in a folder.

        A project is a folder whose pyproject.toml has ``[tool.dagster] module_name``, or
        ``[tool.dg.project] root_module``, as Dagster writes it, or one with a definitions.py. In
        another folder there is only the broker's background work.

        Args:
            module: the module; None: that of the project.
            folder: default: the current folder.

        Raises:
            RequestError: pyproject.toml is not TOML, or does not name a module.
            ModuleNotFoundInProjectError: there is no such module in the folder.
        """
        where = (folder or Path.cwd()).absolute()
        if not where.is_dir():
            raise NotFoundError(f"The folder {where} does not exist.")
        named = module or _module_of(where / PYPROJECT)
        if named is None and (where / f"{DEFINITIONS}.py").is_file():
            named = DEFINITIONS
        if named is None:
            if folder is not None:
                raise NotFoundError(
                    f"The folder {where} has no Dagster project.",
                    remedy="Name the module with -m, or write a project with `rmq init NAME`.",
                )
            return cls(UPKEEP_ONLY, where)
        _check_exists(named, where)
        return cls(named, where)


def _module_of(file: Path) -> str | None:
    """Return the module that a pyproject.toml names; None without a project."""
    try:
        written = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"{file} cannot be read: {error}.") from error
    dagster = _table(written, "tool", "dagster", file=file)
    project = _table(written, "tool", "dg", "project", file=file)
    named = dagster.get("module_name") or project.get("code_location_target_module")
    root = project.get("root_module")
    named = named or (f"{root}.{DEFINITIONS}" if isinstance(root, str) else root)
    if named is not None and not isinstance(named, str):
        raise RequestError(f"{file} names the module {named!r}. Give a text.")
    return named


def _table(written: Any, *path: str, file: Path) -> dict[str, Any]:
    """Return a table of the file; an empty one if it is missing."""
    found: dict[str, Any] = written
    for i, name in enumerate(path):
        found = found.get(name, {})
        if not isinstance(found, dict):
            raise RequestError(f"{file} cannot be read: {'.'.join(path[: i + 1])} is not a table.")
    return found


def _check_exists(module: str, folder: Path) -> None:
    """Refuse a module that neither the folder nor the installation has; imports nothing of it."""
    top, *rest = module.split(".")
    if not all(part.isidentifier() for part in (top, *rest)):
        raise RequestError(
            f"{module!r} is no module name.", remedy="Give one like shop.definitions."
        )
    found = importlib.machinery.PathFinder.find_spec(top, [str(folder)])
    with suppress(ValueError):  # the module of this process itself, which has no place
        found = found or importlib.util.find_spec(top)
    for part in rest:
        if found is None:
            break
        places = found.submodule_search_locations
        found = None if places is None else importlib.machinery.PathFinder.find_spec(part, places)
    if found is None:
        raise ModuleNotFoundInProjectError(f"There is no module {module} in {folder}.")
